/** Images: drawn on a canvas, so that their addresses never get into the page. */
import { html, useEffect, useRef, useState } from "./lib.js";
import { blob, sessionPath } from "./api.js";

/** @param {{address: string, name: string}} props */
export function Picture({ address, name }) {
  const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const [error, setError] = useState("");
  useEffect(() => {
    (async () => {
      const bitmap = await createImageBitmap(await blob(address));
      const element = canvas.current;
      if (!element) return;
      element.width = bitmap.width;
      element.height = bitmap.height;
      element.getContext("2d")?.drawImage(bitmap, 0, 0);
      element.dataset.drawn = "";
    })().catch(() => setError("This picture cannot be shown."));
  }, [address]);
  if (error) return html`<p class="hint">${error}</p>`;
  return html`<canvas class="picture" ref=${canvas} role="img" aria-label=${name}></canvas>`;
}

/** The images of an entry. @param {{sessionKey: string, seq: number, count: number}} props */
export function Pictures({ sessionKey, seq, count }) {
  return html`<div class="row">${Array.from({ length: Math.min(count, 20) }, (_, index) => html`<${Picture} key=${index}
    address=${sessionPath(sessionKey, `pictures/${seq}/${index}`)} name=${`Picture ${index + 1}`} />`)}</div>`;
}
