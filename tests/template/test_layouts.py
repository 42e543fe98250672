"""A project with a copy of ddpkit beside main.py, and with one that pip has installed."""

import json
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import once
from dap import F5, Debugger, configuration
from digest import digest
from generated import DRAWS_NOTHING, ROOT, Done, Project, in_soak, run
from test_template import check_packages, packages
from test_updates import ADDRESS, Repository, cookiecutter, git, make_repository

from ddpkit.version import __version__

pytestmark = pytest.mark.xdist_group("layouts")  # they share what has been installed


@pytest.fixture(scope="module")
def origin(
    template: Path, clean_home: dict[str, str], tmp_path_factory: object
) -> Repository:
    return make_repository(template, tmp_path_factory.mktemp("github"), clean_home)


class Installed(Project):
    """A project of ADDRESS whose requirements.txt has named ddpkit to pip, in `python`."""

    def __init__(self, folder: Path, python: Path) -> None:
        super().__init__(folder, "classification")
        self.python = python
        self.library = next(python.parent.parent.glob("lib/*/site-packages")) / "ddpkit"

    def process(self, *words: object, cwd: Path = Path("/"), **env: str | None) -> Done:
        return run(words, cwd, PYTHON=str(self.python), **env)

    def copy_command(self) -> Done:
        return self.process(self.python, "-m", "ddpkit", "copy", cwd=self.folder)


@pytest.fixture(scope="module")
def installed(origin: Repository, shared: Path) -> Installed:
    """What its README says: cookiecutter, then pip, here without an index."""
    folder = shared / "installed here"
    repository, env = origin
    with once(folder) as is_first:
        if is_first:
            folder.mkdir()
            project = cookiecutter(ADDRESS, cwd=folder, env=env)
            head = git("rev-parse", "HEAD", cwd=repository, env=env).strip()
            line = f"ddpkit[classification] @ git+{ADDRESS}@{head}"
            assert line in packages(project)
            check_packages(project)
            assert not (project / "ddpkit").exists()
            venv = [sys.executable, "-m", "venv", "--without-pip", folder / "v"]
            subprocess.run(venv, check=True)
            place = next((folder / "v").glob("lib/*/site-packages"))
            (place / "those_of_the_tests.pth").write_text(sysconfig.get_path("purelib"))
            python = folder / "v/bin/python"
            pip = [sys.executable, "-m", "pip", "--python", python, "install"]
            pip += ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", line]
            subprocess.run(pip, check=True, env=env)
    return Installed(folder / "my_ddp_project", folder / "v/bin/python")


@pytest.fixture
def own(installed: Installed, tmp_path: Path) -> Installed:
    return Installed(installed.copy(tmp_path / "own").folder, installed.python)


def test_no_file_of_the_template(origin: Repository, installed: Installed) -> None:
    """Neither of a build in the template, nor more of it than the library in the installation."""
    place = installed.library.parent
    found = {path.relative_to(place) for path in place.rglob("*.py")}
    assert found == {path.relative_to(ROOT) for path in (ROOT / "ddpkit").rglob("*.py")}
    assert (installed.library / "py.typed").exists()
    assert "MIT License" in (installed.library / "LICENSE").read_text()
    repository, env = origin
    assert git("status", "--porcelain", "--ignored", cwd=repository, env=env) == ""


@pytest.mark.soak
def test_every_process_uses_the_same(own: Installed, few: Path, tmp_path: Path) -> None:
    """However it is started, with a copy and after it; loader workers, too."""
    flags = own.flags(few, tmp_path / "out", "--workers", 1, "--resume", "never")
    launch = own.folder / "launch.sh"
    copy = own.folder / "ddpkit"
    main = own.folder / "main.py"
    # in a worker
    told = "from ddpkit.data.loading import Collate\n\n\n"
    told += "class Told(Collate):\n    def __call__(self, samples):\n        "
    told += "assert ddpkit.__file__ == __import__('os').environ['EXPECTED']\n        "
    told += "return super().__call__(samples)\n\n\n"
    text = main.read_text().replace(
        "classes=classes,", "classes=classes, collate_fn=Told(),"
    )
    text = text.replace("def main(", f"{told}def main(")
    recipe = "\nimport recipe\n"
    assert text.count(recipe) == 1
    main.write_text(text.replace(recipe, DRAWS_NOTHING + recipe))
    torchrun = [own.python, "-m", "torch.distributed.run", "--nproc-per-node", 1]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", main]
    digests = set()

    def check(library: Path, command: object) -> None:
        env = {
            "NPROC": "1",
            "OMP_NUM_THREADS": None,
            "EXPECTED": f"{library}/__init__.py",
        }
        done = own.process(command, flags, **env).ok()
        assert f"ddpkit {__version__} in {library}\n" in done.out
        versions = json.loads((tmp_path / "out" / "args.json").read_text())["versions"]
        assert versions["ddpkit"] == f"{__version__} in {library}"
        digests.add(digest(tmp_path / "out"))

    assert str(copy) in own.copy_command().ok().out
    assert "MIT License" in (copy / "LICENSE").read_text()
    own.copy_command().refused("__main__.copy", copy)
    check(copy, launch)
    # Without the folder of main.py there are no flags.
    words = [own.python, "-I", "-m", "ddpkit", "check", few]
    isolated = own.process(words, cwd=own.folder)
    isolated.refused("process.own", "flags.py")
    shutil.rmtree(copy)
    check(own.library, torchrun)
    assert len(digests) == 1


def test_what_is_missing(own: Installed, project: Project, tmp_path: Path) -> None:
    """Something to copy, a ddpkit that is new enough, any ddpkit at all."""
    done = own.process(own.python, "-m", "ddpkit", "copy", cwd=tmp_path)
    done.refused("__main__.copy", tmp_path)
    text = (own.folder / "main.py").read_text()
    assert text.count('needs="3.0"') == 1
    (own.folder / "main.py").write_text(text.replace('needs="3.0"', 'needs="3.10"'))
    remedy = "pip install -r requirements.txt"
    done = own.process(own.folder / "launch.sh")
    done.refused("starting.check_itself", f"ddpkit {__version__}", "3.10", remedy)
    before_pip = run([own.folder / "launch.sh"])  # after cookiecutter alone
    before_pip.refused("", "no ddpkit", remedy)


@pytest.mark.parametrize("steps_in", [False, in_soak(True)])
def test_f5(own: Installed, few: Path, steps_in: bool) -> None:
    """F11 steps over the installed library, or into it; test_debug.py has a copied one."""
    flags = shlex.join(map(str, own.flags(few, "runs/debug")))
    config = configuration(own.folder, F5, flags=flags, processes="1")
    if steps_in:
        config["rules"] = [{"module": "ddpkit", "include": True}]
    with Debugger(own.folder) as debugger:
        debugger.set("main.py", " loss = ")
        debugger.launch({**config, "python": [str(own.python)]})
        (rank,) = debugger.stopped(1)
        file = str(own.library / "__init__.py")
        assert rank.evaluate("ddpkit.__file__") == repr(file)
        (rank,) = debugger.go("stepIn", 1)
        assert (str(own.library) in rank.frame["source"]["path"]) == steps_in
        debugger.stop()
        debugger.all_end()
