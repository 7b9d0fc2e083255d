"""The settings: where they come from, which source wins, and how errors are reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everloop import Config
from everloop.config import KEYS
from everloop.config.keys import reference
from everloop.config.sources import DSN
from everloop.errors import ConfigError
from tests.support.places import DOCS

PAGE = DOCS / "config.md"
SECRET = "sk-very-secret"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "everloop home"
    folder.mkdir()
    return folder


def load(home: Path, toml: str = "", env: dict[str, str] | None = None, **flags: object) -> Config:
    """Load with this file, these variables and these flags, independent of the machine."""
    (home / "config.toml").write_text(toml, encoding="utf-8")
    return Config.load(flags, env=env or {}, home=home)


def refusal(home: Path, toml: str = "", env: dict[str, str] | None = None, **flags: object) -> str:
    """Return the one-line error about invalid settings."""
    with pytest.raises(ConfigError) as caught:
        load(home, toml, env, **flags)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_defaults_need_no_file_and_no_variable():
    config = Config()
    assert config.workspace == Path.home() / ".everloop" / "workspace"
    assert config.store == Path.home() / ".everloop" / "everloop.db"
    assert (config.provider, config.base_url, config.api_key, config.model) == ("", "", "", "")
    assert (config.connect_timeout, config.first_token_timeout, config.token_timeout) == (10.0, 120.0, 60.0)
    assert (config.request_timeout, config.retries, list(config.fallbacks)) == (600.0, 4, [])
    assert (config.max_iterations, config.busy, config.tool_timeout, config.name) == (20, "queue", 120.0, "Everloop")
    assert config.restrict_to_workspace is True


def test_a_home_that_does_not_exist_yet_gives_the_defaults(tmp_path):
    home = tmp_path / "new"
    assert Config.load(env={}, home=home) == Config(home=home)
    assert Config(home=home).workspace == home / "workspace"


def test_the_home_comes_from_the_variable_unless_passed(tmp_path):
    assert Config.load(env={"EVERLOOP_HOME": str(tmp_path / "a")}).home == tmp_path / "a"
    assert Config.load(env={"EVERLOOP_HOME": str(tmp_path / "a")}, home=tmp_path / "b").home == tmp_path / "b"
    assert Config.load(env={"EVERLOOP_HOME": ""}).home == Path.home() / ".everloop"


def test_the_process_environment_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("EVERLOOP_HOME", str(tmp_path))
    monkeypatch.setenv("EVERLOOP_MODEL", "from-the-process")
    assert Config.load().model == "from-the-process"


def test_every_key_of_the_file_reaches_its_attribute(home):
    config = load(
        home,
        """
        workspace = "/w"
        store = "/s.db"
        [provider]
        name = "openai"
        base_url = "http://127.0.0.1:11434/v1"
        api_key = "k"
        model = "m"
        fallbacks = ["a", "b"]
        connect_timeout = 1
        first_token_timeout = 2.5
        token_timeout = 3
        request_timeout = 4
        retries = 0
        [agent]
        name = "Ada"
        max_iterations = 7
        busy = "steer"
        restrict_to_workspace = false
        tool_timeout = 9
        """,
    )
    assert config == Config(
        home=home,
        workspace=Path("/w"),
        store=Path("/s.db"),
        provider="openai",
        base_url="http://127.0.0.1:11434/v1",
        api_key="k",
        model="m",
        fallbacks=("a", "b"),
        connect_timeout=1.0,
        first_token_timeout=2.5,
        token_timeout=3.0,
        request_timeout=4.0,
        retries=0,
        name="Ada",
        max_iterations=7,
        busy="steer",
        restrict_to_workspace=False,
        tool_timeout=9.0,
    )
    assert type(config.connect_timeout) is float


def test_a_variable_overrides_the_file_and_a_flag_overrides_both(home):
    toml = '[provider]\nmodel = "file"\nbase_url = "http://file"\nretries = 7\n'
    env = {"EVERLOOP_MODEL": "variable", "EVERLOOP_BASE_URL": "http://variable"}
    config = load(home, toml, env, model="flag")
    assert (config.model, config.base_url, config.retries) == ("flag", "http://variable", 7)


@pytest.mark.parametrize("key", [key for key in KEYS if key.env], ids=lambda key: key.env)
def test_every_variable_reaches_its_attribute(home, key):
    value = "/somewhere" if key.kind.startswith("Path") else "http://x/v1" if key.url else "value"
    value = str(not key.default) if key.kind == "bool" else value
    value = "postgresql://x/y" if key.kind.startswith("DSN") else value
    value = key.choices[-1] if key.choices else value
    assert str(getattr(load(home, env={key.env: value.lower()}), key.attribute)).lower() == value.lower()


def test_the_public_variables_and_flags_are_all_there():
    assert {key.env for key in KEYS if key.env} >= {
        f"EVERLOOP_{name}" for name in ("WORKSPACE", "PROVIDER", "BASE_URL", "API_KEY", "MODEL", "STORE")
    }
    assert {key.attribute for key in KEYS if key.flag} >= {"workspace", "provider", "base_url", "model", "store"}


def test_empty_variables_and_absent_flags_count_as_not_set(home):
    toml = 'workspace = "/w"\n[provider]\nmodel = "file"\n'
    config = load(home, toml, {"EVERLOOP_MODEL": "", "EVERLOOP_WORKSPACE": " "}, model=None, workspace=None)
    assert (config.model, config.workspace) == ("file", Path("/w"))


def test_whitespace_around_a_variable_is_stripped(home):
    assert load(home, env={"EVERLOOP_API_KEY": " key\n"}).api_key == "key"


def test_paths_are_relative_to_the_file_or_for_variables_and_flags_to_the_current_folder(home, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    toml = 'workspace = "work"\nstore = "~/x.db"\n'
    assert load(home, toml).workspace == home / "work"
    assert load(home, toml).store == Path.home() / "x.db"
    assert load(home, toml, {"EVERLOOP_WORKSPACE": "w"}).workspace == here / "w"
    assert load(home, toml, workspace=".").workspace == here
    assert load(home, toml, workspace=Path("~/w")).workspace == Path.home() / "w"


def test_a_file_with_a_byte_order_mark_is_read(home):
    (home / "config.toml").write_bytes(b'\xef\xbb\xbf[provider]\r\nmodel = "m"\r\n')
    assert Config.load(env={}, home=home).model == "m"


WRONG_FILES = {
    '[provider]\nmodle = "m"': '[provider] unknown key "modle" (did you mean "model"?); allowed: name, base_url, ',
    '[provider]\nbase-url = "m"': '[provider] unknown key "base-url" (did you mean "base_url"?)',
    'wrkspace = "x"': 'unknown key "wrkspace" (did you mean "workspace"?); allowed: workspace, store',
    'model = "x"': 'unknown key "model" (did you mean [provider] model?)',
    '[agent]\nworkspace = "x"': '[agent] unknown key "workspace" (it belongs above all sections)',
    "[zebra]\na = 1": 'unknown section "zebra"; allowed: [provider], [local], [agent]',
    "[agnet]\na = 1": 'unknown section "agnet" (did you mean "agent"?); allowed: [provider], [local], [agent]',
    "[channels.link]\nanna = 5": '[channels.link] anna must be a list of strings such as "telegram:123456"',
    '[channels.link]\nallow = ["x"]': "[channels.link] names people, and has no settings of a channel",
    "[provider.extra]\na = 1": '[provider] unknown key "extra"; allowed: ',
    'provider = "openai"': "provider is a section: write [provider] and its keys on the lines below",
    "[workspace]\na = 1": "workspace must be a path",
    '[cron]\nheartbeat_to = "nocolon"': '[cron] heartbeat_to must be `channel:chat_id`, not "nocolon"',
    "workspace = 3": "workspace must be a path, not 3",
    'workspace = ""': 'workspace must be a path, not ""',
    "[agent]\nmax_iterations = 0": "[agent] max_iterations must be a whole number, at least 1, not 0",
    "[agent]\nmax_iterations = 2.5": "[agent] max_iterations must be a whole number, at least 1, not 2.5",
    "[agent]\nmax_iterations = true": "[agent] max_iterations must be a whole number, at least 1, not true",
    '[agent]\nmax_iterations = "ten"': '[agent] max_iterations must be a whole number, at least 1, not "ten"',
    "[provider]\nretries = -1": "[provider] retries must be a whole number, at least 0, not -1",
    "[provider]\ntoken_timeout = 0": "[provider] token_timeout must be a number above 0, not 0",
    "[context]\ncompact_at = 60": "[context] compact_at must be a number above 0 and at most 1, not 60",
    "[provider]\ntoken_timeout = inf": "[provider] token_timeout must be a number above 0",
    "[provider]\ntoken_timeout = nan": "[provider] token_timeout must be a number above 0",
    "[provider]\ntoken_timeout = true": "[provider] token_timeout must be a number above 0, not true",
    '[agent]\nbusy = "fast"': '[agent] busy must be one of "queue", "steer", "interrupt", not "fast"',
    "[agent]\nbusy = [1]": '[agent] busy must be one of "queue", "steer", "interrupt"',
    '[agent]\nrestrict_to_workspace = "no"': '[agent] restrict_to_workspace must be true or false, not "no"',
    "[provider]\nmodel = 5": "[provider] model must be one line of text, not 5",
    '[provider]\nmodel = "a\\nb"': "[provider] model must be one line of text, not 'a\\nb'",
    '[provider]\nfallbacks = "a"': '[provider] fallbacks must be a list of strings, not "a"',
    "[provider]\nfallbacks = [1]": "[provider] fallbacks must be a list of strings",
    '[provider]\nbase_url = "localhost:80"': (
        '[provider] base_url must be an http:// or https:// address, not "localhost:80"'
    ),
    '"two\\nlines" = 1': r"unknown key 'two\nlines'; allowed: workspace, store",
    f"[provider]\ntoken_timeout = 1{'0' * 400}": "[provider] token_timeout must be a number above 0, not inf",
    f"[provider]\nretries = 1{'0' * 5000}": "a number in it has too many digits; write a smaller one",
    '[provider]\nmodel = "a"\nmodel = "b"': "not valid TOML: ",
    "[provider]\nmodel = m": "line 2",
}


@pytest.mark.parametrize("toml", WRONG_FILES)
def test_an_error_in_the_file_names_the_key_and_the_allowed_values(home, toml):
    message = refusal(home, toml)
    assert message.startswith(f"{home}/config.toml: ")
    assert WRONG_FILES[toml] in message


def test_a_file_in_the_users_home_is_shown_with_a_tilde():
    folder = Path.home() / ".everloop"
    folder.mkdir()
    assert refusal(folder, "x = 1").startswith("~/.everloop/config.toml: ")


def test_a_wrong_variable_is_named(home):
    message = refusal(home, env={"EVERLOOP_BASE_URL": "ftp://x"})
    assert message == 'EVERLOOP_BASE_URL must be an http:// or https:// address, not "ftp://x"'


def test_a_wrong_flag_is_named(home):
    assert refusal(home, base_url="x").startswith("--base-url must be an http:// or https:// address")
    assert refusal(home, workspace="").startswith("--workspace must be a path")
    assert refusal(home, modle="x").startswith('unknown flag "modle" (did you mean "model"?); allowed: workspace,')


@pytest.mark.parametrize("dsn", ["postgresql://me:pass@db/x", "postgres://me:pass@db/x", "PostgreSQL://me:pass@db"])
def test_a_postgresql_address_is_a_store_and_its_password_is_not_shown(home, dsn):
    for config in (load(home, f'store = "{dsn}"'), load(home, env={"EVERLOOP_STORE": dsn}), load(home, store=dsn)):
        assert isinstance(config.store, DSN)
        assert config.store.secret == dsn
        assert "pass" not in f"{config} {config.store} {config.store!r}"
    message = refusal(home, workspace=dsn)
    assert message == "--workspace must be a path, not the address of a database"
    assert "pass" not in message


def test_any_other_url_is_not_a_path(home):
    assert refusal(home, store="sqlite:///x.db") == "--store must be a path, not an address"
    assert refusal(home, workspace="a\0b") == "--workspace must be a path, not an address"


def test_the_home_may_not_be_a_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"^EVERLOOP_HOME: .*file is a file, not a folder; "):
        Config.load(env={"EVERLOOP_HOME": str(file)})
    with pytest.raises(ConfigError, match=r"cannot be read \(Not a directory\)"):
        Config.load(env={}, home=file / "below")


def test_a_file_that_cannot_be_read_is_named(home):
    (home / "config.toml").mkdir()
    with pytest.raises(ConfigError, match=r"config\.toml: cannot be read \(Is a directory\); check its path"):
        Config.load(env={}, home=home)


def test_a_file_that_is_not_text_is_named(home):
    (home / "config.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(ConfigError, match=r"config\.toml: not UTF-8 text \(byte 5\); save the file as UTF-8"):
        Config.load(env={}, home=home)


def test_the_home_of_an_unknown_user_is_named(home):
    message = refusal(home, workspace="~nobody-of-that-name/x")
    assert message == "--workspace: no home folder is known for ~nobody-of-that-name; write the whole path"


@pytest.mark.parametrize(
    "toml",
    [f'api_key = "{SECRET}\\n"', f'api_key = ["{SECRET}"]', f"api_key = {SECRET}", f'api_key = "{SECRET}'],
)
def test_the_api_key_is_in_no_error(home, toml):
    assert SECRET not in refusal(home, f"[provider]\n{toml}\n")


def test_the_api_key_is_in_no_error_about_a_variable(home):
    assert refusal(home, env={"EVERLOOP_API_KEY": f"{SECRET}\nx"}) == "EVERLOOP_API_KEY must be one line of text"


def test_a_password_in_an_address_is_in_no_error(home):
    assert SECRET not in refusal(home, env={"EVERLOOP_BASE_URL": f"ftp://me:{SECRET}@host"})


def test_the_api_key_is_in_no_repr(home):
    config = load(home, env={"EVERLOOP_API_KEY": SECRET})
    assert config.api_key == SECRET
    assert SECRET not in repr(config) + str(config)


def test_the_api_key_cannot_be_passed_as_a_flag(home):
    assert refusal(home, api_key=SECRET).startswith('unknown flag "api_key"')


def test_a_config_cannot_be_changed():
    with pytest.raises(AttributeError):
        Config().model = "x"  # type: ignore[misc]


@given(text=st.text(max_size=200))
def test_any_file_gives_a_config_or_a_one_line_error(tmp_path_factory, text):
    home = tmp_path_factory.mktemp("any")
    (home / "config.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    said = ""
    try:
        Config.load(env={}, home=home)
    except ConfigError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1


def test_the_documentation_lists_every_key_as_declared():
    table = reference(KEYS)
    assert table in PAGE.read_text(encoding="utf-8"), f"docs/config.md must contain this table:\n\n{table}"


def test_the_example_in_the_documentation_loads_and_shows_every_section(home):
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    config = load(home, example)
    assert config != Config(home=home)
    assert all(f"[{key.section}]" in example for key in KEYS if key.section)


# ---------------------------------------------------------------------------------------------- endpoints and keys


def saved(home: Path) -> None:
    home.mkdir(parents=True, exist_ok=True)
    text = '[provider]\nbase_url = "https://saved.example/v1"\napi_key = "sk-saved"\nmodel = "m"\n'
    (home / "config.toml").write_text(text)


def test_a_saved_key_and_address_are_not_used_for_another_provider(tmp_path):
    saved(tmp_path)
    for config in (
        Config.load({"provider": "ollama"}, {}, tmp_path),
        Config.load({}, {"EVERLOOP_PROVIDER": "ollama"}, tmp_path),
    ):
        assert (config.provider, config.base_url, config.api_key, config.model) == ("ollama", "", "", "m")


def test_a_saved_key_is_not_sent_to_another_address(tmp_path):
    saved(tmp_path)
    assert Config.load({"base_url": "http://other/v1"}, {}, tmp_path).api_key == ""
    assert Config.load({}, {"EVERLOOP_BASE_URL": "http://other/v1"}, tmp_path).api_key == ""
    assert Config.load({"base_url": "https://saved.example/v1"}, {}, tmp_path).api_key == "sk-saved"
    assert Config.load({"model": "other"}, {}, tmp_path).api_key == "sk-saved"
    # names the protocol, which is also that of the saved one
    config = Config.load({"provider": "openai"}, {}, tmp_path)
    assert (config.base_url, config.api_key) == ("https://saved.example/v1", "sk-saved")


def test_a_key_from_the_environment_is_used_with_flags_unless_it_was_set_for_an_endpoint(tmp_path):
    key = {"EVERLOOP_API_KEY": "sk-mine"}
    assert Config.load({"base_url": "http://other/v1"}, key, tmp_path).api_key == "sk-mine"
    assert Config.load({"provider": "groq"}, key, tmp_path).api_key == "sk-mine"
    bound = {**key, "EVERLOOP_BASE_URL": "http://mine/v1"}
    assert Config.load({"base_url": "http://other/v1"}, bound, tmp_path).api_key == ""
    config = Config.load({"provider": "groq"}, bound, tmp_path)
    assert (config.base_url, config.api_key) == ("", "")


# --- settings that are tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[[policy]]\ntool = "exec"', "needs the key do"),
        ('[[policy]]\ndo = "perhaps"', "do must be one of"),
        ('[policy]\ndo = "ask"', "write [[policy]]"),
        ('[[policy]]\ndo = "ask"\ntol = "exec"', 'unknown key "tol" (did you mean "tool"?)'),
        ('[[policy]]\ndo = "ask"\ntool = "write_file"\ncommand = "git"', "is not exec"),
        ('[[policy]]\ndo = "ask"\ntainted = true', "only means something"),
        ('[[policy]]\ndo = "ask"\narguments = "x"', "a table of strings"),
        ("[mcp.clock]", "needs a command"),
        ('[mcp.clock]\ncommand = "a"\nurl = "http://127.0.0.1"', "not both"),
        ('[mcp.clock]\ncommand = "a"\nheaders = { A = "b" }', "headers"),
        ('[mcp.clock]\nurl = "http://127.0.0.1"\nargs = ["x"]', "args"),
        ('[mcp."a b"]\ncommand = "a"', "a name must be"),
        ('mcp = "x"', "write [mcp.NAME]"),
        ('[web]\nprivate_hosts = ["http://127.0.0.1:80/"]', "`host` or `host:port`"),
        ('[web]\nprivate_hosts = ["127.0.0.1:port"]', "`host` or `host:port`"),
        ('[sandbox]\nenvironment = ["A=B"]', "the name of a variable"),
        ('[agent]\nmessage_to = ["nocolon"]', "`channel:chat_id`"),
        ('[sandbox]\nmode = "of"', "one of"),
    ],
)
def test_an_invalid_table_is_refused_in_one_line(tmp_path, text, expected):
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        Config.load(env={}, home=tmp_path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tables_keep_their_order(tmp_path):
    (tmp_path / "config.toml").write_text(
        '[[policy]]\ndo = "deny"\ntool = "exec"\n[[policy]]\ndo = "allow"\narguments = { path = "a*" }\n'
        '[mcp.clock]\ncommand = "mcp-server-time"\nargs = ["--x"]\n[mcp.far]\nurl = "https://example.com/mcp"\n'
        '[web]\nprivate_hosts = ["wiki.internal", "[::1]:8080"]\n'
    )
    config = Config.load(env={}, home=tmp_path)
    assert [(rule.do, rule.tool, rule.arguments) for rule in config.policy] == [
        ("deny", "exec", {}),
        ("allow", "", {"path": "a*"}),
    ]
    assert [(server.name, server.command, server.args, server.url) for server in config.mcp] == [
        ("clock", "mcp-server-time", ("--x",), ""),
        ("far", "", (), "https://example.com/mcp"),
    ]


@pytest.mark.parametrize(("written", "value"), [("true", True), ("false", False), ('"outside"', "outside")])
def test_untrusted_content_is_everything_nothing_or_external_content(home, written, value):
    assert load(home, f"[agent]\ntaint = {written}\n").taint == value


@pytest.mark.parametrize("written", ['"inside"', "1", "[]"])
def test_any_other_value_of_taint_is_refused_in_one_line(home, written):
    assert 'taint must be true, false or "outside"' in refusal(home, f"[agent]\ntaint = {written}\n")


def test_the_addresses_of_the_settings_cover_all_keys_and_servers(home):
    config = load(home, '[web]\nsearxng_url = "http://a.example"\n[mcp.x]\nurl = "http://b.example"\n')
    assert config.addresses == {"http://a.example", "http://b.example"}


# ---------------------------------------------------------------------------------------------- the section [store]


def test_the_store_has_a_section_that_may_contain_its_location(home):
    assert Config().keep_requests_seconds == 30 * 86_400
    config = load(home, '[store]\npath = "here.db"\nkeep_requests = "12h"')
    assert (config.store, config.store_named) == (home / "here.db", True)
    assert config.keep_requests_seconds == 12 * 3600
    assert load(home, 'store = "there.db"').store == home / "there.db"
    assert load(home, '[store]\nkeep_requests = ""').keep_requests_seconds == 0
    assert load(home, '[store]\npath = "postgresql://u:p@h/d"').store == DSN("postgresql://u:p@h/d")


@pytest.mark.parametrize("value", ['"30"', '"d"', '"-1d"', '"0d"', '"30 d"', "30", "true", '"1y"'])
def test_an_invalid_duration_is_refused_with_the_allowed_values(home, value):
    said = refusal(home, f"[store]\nkeep_requests = {value}")
    assert "[store] keep_requests must be a time like" in said


def test_an_unknown_key_of_the_store_is_named(home):
    assert 'did you mean "keep_requests"?' in refusal(home, '[store]\nkeep_request = "30d"')
