"""`read_file` shows pictures: recognised by content, small enough for a model, and never decoded in this process."""

from __future__ import annotations

import base64
import io
import resource
import sys
import time

import pytest
from PIL import Image

from everloop.tools.files import documents, images
from tests.support.drawing import PIXEL, bomb, colour, drawn, noise, opened, saved


def url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (PIXEL, "image/png"), (drawn("JPEG"), "image/jpeg"), (drawn("GIF"), "image/gif"), (drawn("WEBP"), "image/webp"),
        (drawn("WEBP", lossless=True), "image/webp"), (drawn("JPEG", progressive=True), "image/jpeg"),
        (drawn("WEBP", mode="RGBA", exif=b"Exif\0\0"), "image/webp"),
    ],
)  # fmt: skip
async def test_an_image_is_shown_unchanged_whatever_its_name(desk, folder, data, kind):
    (folder / "picture.dat").write_bytes(data)
    result = await desk.run("read_file", path="picture.dat")
    assert result.status == "ok"
    assert result.images == (url(data, kind),)
    assert kind in result.content


async def test_a_text_that_starts_like_a_picture_is_a_text(desk, folder):
    (folder / "a.bmp").write_text("BMW, Audi and Opel are cars.")
    assert "BMW" in await desk("read_file", path="a.bmp")


@pytest.mark.parametrize(("form", "kind"), [("PNG", "png"), ("JPEG", "jpeg"), ("WEBP", "jpeg"), ("GIF", "png")])
async def test_an_image_with_more_pixels_than_models_use_is_downscaled(desk, folder, form, kind):
    (folder / "a").write_bytes(drawn(form, (5_000, 100)))
    result = await desk.run("read_file", path="a")
    shown = opened(result.images[0])
    assert shown.size == (2_048, 41)
    assert str(shown.format).lower() == kind
    assert colour(shown, 500, 20) == "red"
    assert colour(shown, 1_500, 20) == "blue"
    assert "scaled down from 5000 x 100 pixels" in result.content


def tables_first(data: bytes) -> bytes:
    """The same JPEG with its Huffman tables before its size."""
    start = data.index(b"\xff\xc4")
    end = start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")
    return data[:2] + data[start:end] + data[2:start] + data[end:]


@pytest.mark.parametrize(
    "data",
    [
        drawn("PNG", (2_500, 77)), drawn("GIF", (2_500, 77)), drawn("JPEG", (2_500, 77)), drawn("WEBP", (2_500, 77)),
        drawn("JPEG", (2_500, 77), progressive=True), tables_first(drawn("JPEG", (2_500, 77))),
        drawn("WEBP", (2_500, 77), lossless=True), drawn("WEBP", (2_500, 77), mode="RGBA", exif=b"Exif\0\0"),
    ],
)  # fmt: skip
async def test_the_size_is_read_from_the_header_of_every_kind(desk, folder, data):
    (folder / "a").write_bytes(data)
    assert "scaled down from 2500 x 77 pixels" in await desk("read_file", path="a")


async def test_an_image_of_too_many_bytes_is_downscaled(desk, folder):
    data = noise("PNG")
    assert len(data) > images.MAX_IMAGE_BYTES
    (folder / "a.png").write_bytes(data)
    result = await desk.run("read_file", path="a.png")
    shown = opened(result.images[0])
    assert shown.size == (1_500, 1_200)
    assert len(result.images[0]) < images.MAX_IMAGE_BYTES * 4 / 3


async def test_a_photo_of_very_many_pixels_is_decoded_in_little_memory(desk, folder, monkeypatch):
    monkeypatch.setattr(documents, "MEGABYTES", 250)
    (folder / "a.jpg").write_bytes(drawn("JPEG", (9_000, 9_000), "L"))
    assert opened((await desk.run("read_file", path="a.jpg")).images[0]).size == (2_048, 2_048)


async def test_an_image_is_downscaled_only_as_far_as_necessary(desk, folder, monkeypatch):
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 60_000)
    (folder / "a.png").write_bytes(noise("PNG", (800, 600)))
    result = await desk.run("read_file", path="a.png")
    assert len(base64.b64decode(result.images[0].partition(",")[2])) <= 60_000
    assert opened(result.images[0]).size[0] < 800


async def test_transparent_parts_stay_transparent_or_become_white(desk, folder, monkeypatch):
    clear = Image.new("RGBA", (3_000, 1_000), (255, 0, 0, 0))
    (folder / "a.png").write_bytes(saved(clear, "PNG"))
    assert opened((await desk.run("read_file", path="a.png")).images[0]).getchannel("A").getextrema() == (0, 0)
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 8_000)
    noisy = Image.effect_noise((400, 400), 90).convert("RGBA")
    noisy.paste((255, 0, 0, 0), (0, 0, 200, 400))
    (folder / "b.png").write_bytes(saved(noisy, "PNG"))
    shown = opened((await desk.run("read_file", path="b.png")).images[0])
    assert shown.format == "JPEG"
    assert colour(shown, 5, 5) == "white"


async def test_sixteen_bit_grey_keeps_its_tones(desk, folder):
    grey = Image.new("I;16", (3_000, 10), 0x8000)
    (folder / "a.png").write_bytes(saved(grey, "PNG"))
    shown = opened((await desk.run("read_file", path="a.png")).images[0])
    assert colour(shown, 5, 2) == "grey"


@pytest.mark.parametrize("form", ["BMP", "TIFF", "AVIF"])
async def test_other_kinds_of_images_are_converted(desk, folder, form):
    (folder / "a").write_bytes(drawn(form, (64, 32)))
    result = await desk.run("read_file", path="a")
    assert opened(result.images[0]).size == (64, 32)


async def test_the_first_frame_of_an_animated_image_is_shown(desk, folder):
    frames = [Image.new("P", (30, 30), number) for number in range(3)]
    (folder / "a.gif").write_bytes(saved(frames[0], "GIF", save_all=True, append_images=frames[1:], loop=0))
    assert opened((await desk.run("read_file", path="a.gif")).images[0]).format == "PNG"


# --- without Pillow ------------------------------------------------------------------------------------------------


async def test_without_pillow_a_large_image_is_shown_unchanged_if_model_apis_accept_it(desk, folder, monkeypatch):
    monkeypatch.setattr(documents, "PYTHON", (sys.executable, "-I", "-S"))  # without any installed package
    data = drawn("JPEG", (4_000, 50))
    (folder / "a.jpg").write_bytes(data)
    assert (await desk.run("read_file", path="a.jpg")).images == (url(data, "image/jpeg"),)
    for name, big in {"b.png": noise("PNG"), "c.jpg": drawn("JPEG", (8_001, 10)), "d.bmp": drawn("BMP")}.items():
        (folder / name).write_bytes(big)
        assert 'pip install "everloop[images]"' in await desk.fails("read_file", path=name)


# --- images crafted to break decoders ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(50_000, 50_000), (12_000, 20_000), (0x7FFFFFFF, 0x7FFFFFFF), (0, 5)])
async def test_a_decompression_bomb_costs_neither_memory_nor_time(desk, folder, monkeypatch, size):
    monkeypatch.setattr(documents, "MEGABYTES", 300)
    (folder / "a.png").write_bytes(bomb(*size))
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    others = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # the largest child of this process so far
    await desk.fails("read_file", path="a.png")
    assert time.monotonic() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= max(350_000, others)


async def test_decoding_a_picture_times_out(desk, folder, monkeypatch):
    monkeypatch.setattr(documents, "SECONDS", 1.0)
    (folder / "a.png").write_bytes(bomb(10_000, 9_000, whole=True))
    start = time.monotonic()
    await desk.run("read_file", path="a.png")  # a quick machine may manage it
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "AVIF"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
async def test_a_truncated_image_is_explained_and_not_sent(desk, folder, form, share):
    data = noise(form, (300, 200))
    cut = data[: max(40, int(len(data) * share))]
    (folder / "a").write_bytes(cut)
    result = await desk.run("read_file", path="a")
    if form == "GIF":  # its format has no end marker that could be missing
        return
    assert not any(base64.b64encode(cut).decode() in image for image in result.images)
    assert "Traceback" not in result.content


async def test_a_jpeg_of_only_headers_is_refused_quickly(desk, folder):
    (folder / "a.jpg").write_bytes(b"\xff\xd8" + b"\xff\xe0\0\2" * 2_000_000 + b"\xff\xd9")
    start = time.process_time()
    await desk.fails("read_file", path="a.jpg")
    assert time.process_time() - start < 0.5


async def test_only_the_decoder_matching_the_files_first_bytes_is_used(desk, folder):
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n"
    (folder / "a.bmp").write_bytes(b"BM" + bytes(12) + b"\x28\0\0\0" + postscript)
    assert "Traceback" not in await desk.fails("read_file", path="a.bmp")


async def test_a_module_in_the_workspace_is_not_imported(desk, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    for name in ("PIL", "sitecustomize", "io", "warnings"):
        (folder / f"{name}.py").write_text(f"open({str(folder.parent / 'escaped')!r}, 'w')\n")
    (folder / "a.png").write_bytes(drawn("PNG", (3_000, 10)))
    assert opened((await desk.run("read_file", path="a.png")).images[0]).width == 2_048
    assert not (folder.parent / "escaped").exists()


async def test_a_downscaled_picture_loses_its_metadata_but_keeps_its_orientation(desk, folder):
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by a quarter turn
    exif[0x010F] = "canary-camera"
    exif.get_ifd(0x8825)[0x1D] = "2026:canary"
    (folder / "a.jpg").write_bytes(drawn("JPEG", (3_000, 1_500), exif=exif, comment=b"canary-comment"))
    result = await desk.run("read_file", path="a.jpg")
    shown = opened(result.images[0])
    assert shown.size == (1_024, 2_048)
    assert colour(shown, 500, 100) == "red"  # the left side is now the top
    assert colour(shown, 500, 1_900) == "blue"
    assert b"canary" in (folder / "a.jpg").read_bytes()
    assert b"canary" not in base64.b64decode(result.images[0].partition(",")[2])
    assert not dict(shown.getexif())
    for form in ("PNG", "WEBP"):
        buffer = io.BytesIO()
        Image.new("RGB", (2_500, 10)).save(buffer, form, exif=exif, icc_profile=b"canary-profile" * 10)
        (folder / "b").write_bytes(buffer.getvalue())
        result = await desk.run("read_file", path="b")
        assert b"canary" not in base64.b64decode(result.images[0].partition(",")[2])
