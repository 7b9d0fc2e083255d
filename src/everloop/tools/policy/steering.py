"""Files that other programs execute or obey automatically, such as the agent's instructions and build files.

After untrusted content was read, writing one of them needs approval. A command may not leave one behind either.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from ...sandbox.reach import STEERING

_AGENT = "it instructs the agent"
_GIT = "your git reads it"
_EDITOR = "your editor runs it"
_SHELL = "your shell runs it"
_MAKE = "make runs it"
_BUILD = "a build tool runs it"
_CI = "your build server runs it"
_NODE = "npm and its like run it"
_PYTHON = "Python and its tools run it"
_CARGO = "cargo runs it"
_JVM = "gradle or maven runs it"
_CONTAINER = "your container tool runs it"

# By file name in lower case, in any folder.
_NAMES: dict[str, str] = {
    name: why
    for why, names in (
        (_MAKE, "makefile gnumakefile bsdmakefile makefile.in makefile.am"),
        (
            _BUILD,
            "justfile .justfile taskfile.yml taskfile.yaml rakefile gruntfile.js gulpfile.js sconstruct wscript "
            "meson.build cmakelists.txt cmakepresets.json dodo.py fabfile.py magefile.go binding.gyp composer.json "
            "mix.exs build.zig build.boot project.clj gemfile gemfile.lock directory.build.props "
            "directory.build.targets module.bazel build.bazel .bazelrc tiltfile snakefile guardfile podfile dangerfile "
            "brewfile xmake.lua package.swift rebar.config setup.hs build.sc build.mill",
        ),
        ("direnv runs it", ".envrc"),
        (
            _NODE,
            "package.json package-lock.json npm-shrinkwrap.json yarn.lock pnpm-lock.yaml bun.lock bun.lockb .npmrc "
            ".yarnrc .yarnrc.yml .pnpmfile.cjs pnpm-workspace.yaml deno.json deno.jsonc bunfig.toml karma.conf.js",
        ),
        (
            _PYTHON,
            "setup.py pyproject.toml setup.cfg tox.ini noxfile.py conftest.py pytest.ini sitecustomize.py "
            "usercustomize.py poetry.lock uv.lock pdm.lock pipfile pipfile.lock pip.conf .pdbrc .pylintrc pylintrc "
            "hatch.toml hatch_build.py mypy.ini .mypy.ini .flake8 .coveragerc .pytest.ini pytest.toml tox.toml",
        ),
        (_CARGO, "cargo.toml cargo.lock build.rs rust-toolchain rust-toolchain.toml"),
        (
            _JVM,
            "build.gradle build.gradle.kts settings.gradle settings.gradle.kts gradlew gradlew.bat gradle.properties "
            "init.gradle pom.xml mvnw build.xml build.sbt",
        ),
        (
            _CONTAINER,
            "dockerfile containerfile docker-compose.yml docker-compose.yaml compose.yml compose.yaml "
            "compose.override.yml compose.override.yaml vagrantfile procfile .devcontainer.json",
        ),
        (
            _CI,
            ".gitlab-ci.yml jenkinsfile .travis.yml appveyor.yml azure-pipelines.yml bitbucket-pipelines.yml "
            ".drone.yml .woodpecker.yml .woodpecker.yaml .cirrus.yml cloudbuild.yaml buildspec.yml netlify.toml",
        ),
        (
            _GIT,
            ".pre-commit-config.yaml .pre-commit-hooks.yaml lefthook.yml lefthook.yaml .lefthook.yml .lefthook.yaml "
            ".gitattributes .gitmodules .gitconfig",
        ),
        (
            _SHELL,
            ".bashrc .bash_profile .bash_login .bash_logout .bash_aliases .profile .zshrc .zshenv .zprofile .zlogin "
            ".kshrc .cshrc .tcshrc .login .inputrc .xinitrc .xprofile .tmux.conf .screenrc .autoenv .autoenv.zsh "
            "mise.toml .mise.toml .tool-versions flake.nix shell.nix default.nix",
        ),
        (
            _EDITOR,
            ".vimrc .exrc .gvimrc .nvimrc .nvim.lua .dir-locals.el .dir-locals-2.el .emacs .lvimrc "
            ".ideavimrc .kateconfig",
        ),
        ("a debugger runs it", ".gdbinit .lldbinit"),
        ("an interpreter runs it", ".irbrc .pryrc .rprofile .iex.exs .ghci .ocamlinit .erlang .octaverc"),
        (
            _AGENT,
            "agents.md claude.md gemini.md .cursorrules .windsurfrules .clinerules .goosehints .mcp.json "
            "copilot-instructions.md .aider.conf.yml opencode.json crush.json",
        ),
    )
    for name in names.split()
}
_SUFFIXES: dict[str, str] = {
    ".mk": _MAKE,
    ".mak": _MAKE,
    ".pth": _PYTHON,
    ".code-workspace": _EDITOR,
    ".sublime-project": _EDITOR,
    ".cmake": _BUILD,
    ".gradle": _JVM,
    ".gemspec": _BUILD,
    ".csproj": _BUILD,
    ".fsproj": _BUILD,
    ".vcxproj": _BUILD,
    ".dockerfile": _CONTAINER,
}
# By file name up to its second dot: `.eslintrc.json`, `Makefile.local`.
_STEMS: dict[str, str] = {
    "dockerfile": _CONTAINER,
    "makefile": _MAKE,
    **dict.fromkeys((".eslintrc", ".prettierrc", ".stylelintrc", ".babelrc", ".mocharc", ".nycrc"), _NODE),
    **dict.fromkeys((".lintstagedrc", ".commitlintrc", ".huskyrc"), _GIT),
}
_NODE_CONFIGS = tuple(f".config.{ending}" for ending in ("js", "cjs", "mjs", "ts", "cts", "mts"))  # vite.config.ts
_PATTERNS = (
    ("docker-compose.*.y*ml", _CONTAINER),
    ("compose.*.y*ml", _CONTAINER),
)
# By consecutive folders (or finally a file), anywhere in the path: everything in them counts.
_FOLDERS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((".vscode",), _EDITOR),
    ((".idea",), _EDITOR),
    ((".fleet",), _EDITOR),
    ((".vim",), _EDITOR),
    ((".zed",), _EDITOR),
    ((".helix",), _EDITOR),
    ((".github", "workflows"), _CI),
    ((".github", "actions"), _CI),
    ((".gitea", "workflows"), _CI),
    ((".forgejo", "workflows"), _CI),
    ((".circleci",), _CI),
    ((".buildkite",), _CI),
    ((".woodpecker",), _CI),
    ((".husky",), _GIT),
    ((".githooks",), _GIT),
    ((".git",), _GIT),
    ((".devcontainer",), _CONTAINER),
    ((".cargo", "config.toml"), _CARGO),
    ((".cargo", "config"), _CARGO),
    ((".venv", "bin"), _PYTHON),
    (("venv", "bin"), _PYTHON),
    ((".venv", "pyvenv.cfg"), _PYTHON),
    (("venv", "pyvenv.cfg"), _PYTHON),
    (("node_modules", ".bin"), _NODE),
    (("gradle", "wrapper"), _JVM),
    ((".mvn",), _JVM),
    ((".yarn",), _NODE),
    ((".claude",), _AGENT),
    ((".cursor",), _AGENT),
    ((".codex",), _AGENT),
    ((".opencode",), _AGENT),
)
_OURS = frozenset(name.lower() for name in STEERING)
# Folders that tools fill: a command that installs or builds writes thousands of files there.
_GENERATED = frozenset({
    "node_modules", "bower_components", ".venv", "venv", "site-packages", ".tox", ".nox", ".git", "__pycache__",
    "target", "build", "dist", "out", ".eggs", ".gradle", ".next", ".nuxt", ".cache", ".mypy_cache", ".pytest_cache",
    ".ruff_cache", ".hypothesis", ".terraform", "_deps", "cmakefiles", ".pnpm-store", ".everloop",
})  # fmt: skip
# Files outside of those folders that such tools rewrite by themselves.
_WRITTEN_BY_TOOLS = frozenset({
    "package-lock.json", "npm-shrinkwrap.json", "yarn.lock", "pnpm-lock.yaml", "bun.lock", "bun.lockb", "poetry.lock",
    "uv.lock", "pdm.lock", "pipfile.lock", "cargo.lock", "gemfile.lock",
})  # fmt: skip


def steers(relative_path: str) -> str:
    """Return why a file of the workspace must not be planted: which program executes or obeys it; "" if none does."""
    parts = [part for part in relative_path.lower().split("/") if part not in ("", ".")]
    if not parts:
        return ""
    if parts[0] in _OURS:
        return _AGENT
    for folders, why in _FOLDERS:
        if folders[0] in parts and _contains(parts, folders):
            return why
    name = parts[-1]
    if why := _NAMES.get(name, ""):
        return why
    if why := _STEMS.get(name[:1] + name[1:].partition(".")[0], ""):
        return why
    if "." in name and (why := _SUFFIXES.get(name[name.rindex(".") :], "")):
        return why
    if name.endswith(_NODE_CONFIGS):
        return _NODE
    return next((why for pattern, why in _PATTERNS if fnmatchcase(name, pattern)), "")


def leads_to_steering(relative_path: str) -> bool:
    """Return whether a link of this name replaces a folder with steering files (`.github` for `.github/workflows`)."""
    last = relative_path.lower().rsplit("/", 1)[-1]
    return any(last in folders[:-1] for folders, _ in _FOLDERS)


def is_generated(relative_path: str) -> bool:
    """Return whether a folder is filled by tools: commands may write anything there."""
    name = relative_path.lower().rsplit("/", 1)[-1]
    return name in _GENERATED or name.endswith((".egg-info", ".dist-info"))


def planted_by_command(relative_path: str) -> str:
    """Like `steers`, for files that a command leaves behind.

    Excluded are files that tools maintain by themselves, the agent's files, which are checked by folder, and `.git`,
    which is checked as a repository.
    """
    path = relative_path.lower()
    name = path.rsplit("/", 1)[-1]
    if name == ".git" or name in _WRITTEN_BY_TOOLS or path.split("/")[0] in _OURS:
        return ""
    return steers(relative_path)


def named_by_command(relative_path: str) -> str:
    """Like `steers`, for files that a command names literally.

    That is what `planted_by_command` returns, plus the agent's files, except inside folders that tools fill.
    """
    folders = relative_path.split("/")
    if folders[0].lower() in _OURS:
        return _AGENT
    return "" if any(map(is_generated, folders[:-1])) else planted_by_command(relative_path)


def _contains(parts: list[str], folders: tuple[str, ...]) -> bool:
    count = len(folders)
    return any(tuple(parts[start : start + count]) == folders for start in range(len(parts) - count + 1))
