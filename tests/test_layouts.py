"""A project with a copy of ddpkit beside main.py, and with one that pip has installed."""

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import once
from dap import Debugger, configuration, line_of
from digest import digest
from older import unpack
from running import ROOT, SAME_FOR_BOTH, Done, Project, run, small
from test_template import commit, cookiecutter, cruft, cruft_file, git

OLD = "e4a9bfb"  # the last commit with the library in the project, as engine/
ADDRESS = "https://github.com/org/ddp-template"
Redirect = tuple[Path, dict[str, str]]


@pytest.fixture(scope="module")
def redirect(template: Path, clean_home: dict[str, str], shared: Path) -> Redirect:
    """A repository of the template, and an environment in which git finds it at ADDRESS."""
    copy = shared / "github" / "ddp-template"
    env = {
        **clean_home,
        **{"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.{copy.parent}/.insteadOf"},
        "GIT_CONFIG_VALUE_0": "https://github.com/org/",
    }
    copy.parent.mkdir(exist_ok=True)
    with once(copy) as is_first:
        if is_first:
            shutil.copytree(template, copy, symlinks=True)
            git("init", "--quiet", "--initial-branch", "main", cwd=copy, env=env)
            commit(copy, env)
    return copy, env


class Installed(Project):
    """A project of ADDRESS whose requirements.txt has named ddpkit to pip, in `python`."""

    def __init__(self, folder: Path, python: Path) -> None:
        super().__init__(folder, "classification")
        self.python = python
        self.library = next(python.parent.parent.glob("lib/*/site-packages")) / "ddpkit"

    def start(self, *words: object, cwd: Path = Path("/"), **env: str) -> Done:
        return run(words, cwd=cwd, PYTHON=str(self.python), **env)


@pytest.fixture(scope="module")
def installed(redirect: Redirect, shared: Path) -> Iterator[Installed]:
    """What its README says: cookiecutter, then pip, here without an index."""
    folder = shared / "installed here"
    repository, env = redirect
    with once(folder) as is_first:
        if is_first:
            folder.mkdir()
            project = cookiecutter(ADDRESS, cwd=folder, env=env)
            head = git("rev-parse", "HEAD", cwd=repository, env=env).strip()
            line = f"ddpkit[classification] @ git+{ADDRESS}@{head}"
            assert (project / "requirements.txt").read_text() == f"{line}\n"
            assert not (project / "ddpkit").exists()
            subprocess.run(
                [sys.executable, "-m", "venv", "--without-pip", folder / "v"], check=True
            )
            place = next((folder / "v").glob("lib/*/site-packages"))
            (place / "those_of_the_tests.pth").write_text(sysconfig.get_path("purelib"))
            pip = [sys.executable, "-m", "pip", "--python", folder / "v/bin/python", "install"]
            offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", line]
            subprocess.run([*pip, *offline], check=True, env=env)
    yield Installed(folder / "my_ddp_project", folder / "v/bin/python")


@pytest.fixture
def own(installed: Installed, tmp_path: Path) -> Installed:
    return Installed(installed.copy(tmp_path / "own").folder, installed.python)


def used(done: Done) -> str:
    """Which ddpkit a run says that it uses."""
    (line,) = (line for line in done.ok().out.splitlines() if line.startswith("ddpkit "))
    return line.removeprefix("ddpkit 1.0.0 in ")


def test_no_file_of_the_template(redirect: Redirect, installed: Installed) -> None:
    """Neither of a build in the template, nor more of it than the library in the installation."""
    names = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ddpkit").rglob("*.py")}
    found = installed.library.parent.rglob("*.py")
    assert {path.relative_to(installed.library.parent).as_posix() for path in found} == names
    assert (installed.library / "py.typed").exists()
    repository, env = redirect
    assert git("status", "--porcelain", "--ignored", cwd=repository, env=env) == ""


@SAME_FOR_BOTH
def test_one_rank_and_many_use_the_same(own: Installed, few: Path, tmp_path: Path) -> None:
    """However they are started, from another folder, before the copy, with it, and after it."""
    flags = [*small(few), "--data", few, "--workers", 2, "--resume", "never"]
    main, launch = own.folder / "main.py", own.folder / "launch.sh"
    (own.folder / "dataset.py").write_text(
        (own.folder / "dataset.py").read_text()
        + "\n\nclass Told(ddpkit.Collate):\n    def __call__(self, samples):\n"
        + "        assert ddpkit.__file__ == __import__('os').environ['EXPECTED']\n"
        + "        return super().__call__(samples)\n"
    )
    text = main.read_text().replace("ddpkit.Collate()", "dataset.Told()")
    main.write_text(text.replace("import recipe\n", "import dataset\nimport recipe\n"))
    torchrun = [own.python, "-m", "torch.distributed.run", "--nproc-per-node", 2]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", main]
    digests = set()

    def check(library: Path) -> None:
        for number, words in enumerate(([own.python, main], [launch], torchrun)):
            out = tmp_path / f"out{number}"
            expected = str(library / "__init__.py")
            done = own.start(*words, *flags, "--output-dir", out, EXPECTED=expected)
            assert used(done) == str(library)
            versions = json.loads((out / "args.json").read_text())["versions"]
            assert versions["ddpkit"] == f"1.0.0 in {library}"
            if number:
                digests.add(digest(out))

    check(own.library)
    copied = own.start(own.python, "-m", "ddpkit", "copy", cwd=own.folder).ok()
    assert str(own.folder / "ddpkit") in copied.out
    own.start(own.python, "-m", "ddpkit", "copy", cwd=own.folder).refused("there already")
    check(own.folder / "ddpkit")
    # Where the folder of main.py is left out, the other one would be used in silence.
    isolated = [own.python, "-I", "-m", "ddpkit", "copy"]
    own.start(*isolated, cwd=own.folder).refused("instead of", "-I")
    assert len(digests) == 1

    changed = own.folder / "ddpkit/errors.py"
    before = changed.read_text()
    changed.write_text(before + "# mine\n")
    undo = [own.python, "-m", "ddpkit", "copy", "--undo"]
    own.start(*undo, cwd=own.folder).refused("errors.py", "remove the folder yourself")
    assert changed.read_text() == before + "# mine\n"
    changed.write_text(before)
    own.start(*undo, cwd=own.folder).ok()
    assert not (own.folder / "ddpkit").exists()
    expected = str(own.library / "__init__.py")
    done = own.start(launch, *flags, "--output-dir", tmp_path / "out", EXPECTED=expected)
    assert used(done) == str(own.library)


@SAME_FOR_BOTH
def test_where_there_is_nothing_to_copy(own: Installed, project: Project, tmp_path: Path) -> None:
    copy = [own.python, "-m", "ddpkit", "copy"]
    own.start(*copy, cwd=tmp_path).refused("no main.py", str(tmp_path))
    own.start(*copy, "--undo", cwd=own.folder).refused("no copy")
    words = [sys.executable, "-m", "ddpkit", "copy", "--undo"]
    run(words, cwd=project.folder).refused("no other ddpkit")


def test_an_older_ddpkit_than_main_needs(own: Installed) -> None:
    text = (own.folder / "main.py").read_text()
    assert text.count('needs="1.0"') == 1
    (own.folder / "main.py").write_text(text.replace('needs="1.0"', 'needs="1.10"'))
    done = own.start(own.folder / "launch.sh")
    done.refused("is ddpkit 1.0.0, main.py needs 1.10", "pip install -r requirements.txt")
    assert done.status == 2


def test_without_ddpkit(installed: Installed) -> None:
    """As after cookiecutter alone, before pip."""
    done = run([installed.folder / "launch.sh"])
    done.refused("no ddpkit", "pip install -r requirements.txt")
    assert done.status == 2


@SAME_FOR_BOTH
def test_f5(installed: Installed, few: Path) -> None:
    """F11 steps over the installed library; one configuration steps into it."""
    for name in ("DDP: torch.distributed.launch", "DDP: step into ddpkit"):
        flags = " ".join(map(str, small(few)))
        config = configuration(installed.folder, name, flags=f'{flags} --data "{few}"')
        config["python"] = [str(installed.python)]
        main = installed.folder / "main.py"
        line = line_of(main, "loss = run.loss(")
        with Debugger(installed.folder, {"main.py": [{"line": line}]}) as debugger:
            debugger.launch(config)
            ranks = debugger.stopped()
            for number, rank in enumerate(ranks):
                assert rank.threads()[0] == f"rank {number}"
                assert rank.evaluate("ddpkit.__file__") == repr(
                    str(installed.library / "__init__.py")
                )
                rank.go("stepIn")
            ranks = debugger.stopped()
            for rank in ranks:
                into = rank.frame["source"]["path"].endswith("site-packages/ddpkit/run/loop.py")
                assert into == (name == "DDP: step into ddpkit")
            debugger.set({})
            for rank in ranks:
                rank.go()
            assert debugger.finish() == 0


@pytest.mark.parametrize("by", [ADDRESS, "a folder"])
def test_update_over_the_split(
    clean_home: dict[str, str], template: Path, tmp_path: Path, by: str
) -> None:
    """From a project whose library is its own engine/, with an owner's edits, by cruft."""
    repository = unpack(OLD, tmp_path).rename(tmp_path / "ddp-template")
    env = {
        **clean_home,
        **{"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.{tmp_path}/.insteadOf"},
        "GIT_CONFIG_VALUE_0": "https://github.com/org/",
    }
    git("init", "--quiet", "--initial-branch", "main", cwd=repository, env=env)
    commit(repository, env)
    project = tmp_path / "my_ddp_project"
    address = str(repository) if by == "a folder" else by
    cruft("create", address, "--no-input", cwd=tmp_path, env=env)
    git("init", "--quiet", cwd=project, env=env)
    for name, old, mine in (
        ("recipe.py", "** 0.9", "** 0.8"),
        ("main.py", "def train_one_epoch(", "# mine\n\n\ndef train_one_epoch("),
    ):
        text = (project / name).read_text()
        assert old in text
        (project / name).write_text(text.replace(old, mine))
    commit(project, env)

    for path in repository.iterdir():
        if path.name != ".git":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(template, repository, symlinks=True, dirs_exist_ok=True)
    newest = commit(repository, env)
    cruft("update", "--skip-apply-ask", cwd=project, env=env)
    git("diff", "--check", cwd=project, env=env)  # fails on conflict markers
    assert not [*project.rglob("*.rej")]
    assert "** 0.8" in (project / "recipe.py").read_text()
    assert "# mine\n" in (project / "main.py").read_text()
    assert not [*(project / "engine").rglob("*.py")]
    is_copy = by == "a folder"
    assert (project / "ddpkit/__init__.py").exists() == is_copy
    required = (project / "requirements.txt").read_text()
    line = f"ddpkit[classification] @ git+{ADDRESS}@{newest}\n"
    assert line in required if not is_copy else "ddpkit" not in required
    assert cruft_file(project)["commit"] == newest
    compiled = [sys.executable, "-m", "compileall", "-q", "."]
    subprocess.run(compiled, cwd=project, check=True)

    (repository / "new.txt").write_text("new")
    newest = commit(repository, env)
    commit(project, env)
    cruft("update", "--skip-apply-ask", cwd=project, env=env)
    if not is_copy:  # the line is brought up to date
        assert newest in (project / "requirements.txt").read_text()


def test_from_an_archive(redirect: Redirect, clean_home: dict[str, str], tmp_path: Path) -> None:
    """Where the link to the library is a file with its name, as in GitHub's archives."""
    repository, env = redirect
    archive = tmp_path / "template.zip"
    words = ["archive", "--prefix=ddp-template-main/", "--output", archive, "HEAD"]
    git(*map(str, words), cwd=repository, env=env)
    project = cookiecutter(archive, cwd=tmp_path, env=clean_home)
    for path in (repository / "ddpkit").rglob("*"):
        if path.is_file():
            same = project / path.relative_to(repository)
            assert same.read_bytes() == path.read_bytes()
