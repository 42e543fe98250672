"""The template as a repository: its projects, forks and releases, and what cruft brings later."""

import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from generated import ROOT, TEMPLATE_FOLDER

from ddpkit.version import __version__

ADDRESS = "https://github.com/org/ddp-template"
Env = dict[str, str]
Repository = tuple[Path, Env]


def git(*args: object, cwd: Path, env: Env) -> str:
    options = {"check": True, "capture_output": True, "text": True}
    return subprocess.run(["git", *args], cwd=cwd, env=env, **options).stdout


def commit(repository: Path, env: Env) -> str:
    """Commit all changes and return the commit."""
    git("add", "--all", cwd=repository, env=env)
    git("commit", "--quiet", "--message", "a change", cwd=repository, env=env)
    return git("rev-parse", "HEAD", cwd=repository, env=env).strip()


def cruft(*args: object, cwd: Path, env: Env) -> str:
    """Run it, and return what it has printed."""
    command = [sys.executable, "-m", "cruft", *args]
    options = {"check": True, "stdout": subprocess.PIPE, "text": True}
    return subprocess.run(command, cwd=cwd, env=env, **options).stdout


def cookiecutter(*args: object, cwd: Path, env: Env) -> Path:
    """Generate a project in `cwd` and return its folder."""
    command = [sys.executable, "-m", "cookiecutter", *args, "--no-input"]
    subprocess.run(command, cwd=cwd, env=env, check=True)
    return cwd / "my_ddp_project"


def cruft_file(project: Path) -> dict:
    return json.loads((project / ".cruft.json").read_text())


def requirements(project: Path) -> str:
    return (project / "requirements.txt").read_text()


def make_repository(template: Path, folder: Path, env: Env) -> Repository:
    """A repository of the template, and an environment in which git finds it at ADDRESS."""
    copy = shutil.copytree(template, folder / "ddp-template.git", symlinks=True)
    account = ADDRESS.removeprefix("https://").removesuffix("/ddp-template")
    accounts = f"name:password@{account}", account, "github.com/my-lab"
    for number, account in enumerate(accounts):
        env = {**env, f"GIT_CONFIG_KEY_{number}": f"url.{folder}/.insteadOf"}
        env[f"GIT_CONFIG_VALUE_{number}"] = f"https://{account}/"
        env["GIT_CONFIG_COUNT"] = str(number + 1)
    git("init", "--quiet", "--initial-branch", "main", cwd=copy, env=env)
    commit(copy, env)
    return copy, env


@pytest.fixture
def repository(template: Path, clean_home: Env, tmp_path: Path) -> Repository:
    return make_repository(template, tmp_path / "origin", clean_home)


def edit(project: Path, env: Env, **changes: tuple[str, str]) -> None:
    """Make the project a repository of its owner's, with edits: module=(text, what replaces it)."""
    git("init", "--quiet", cwd=project, env=env)
    for name, (old, new) in changes.items():
        path = project / f"{name}.py"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
    commit(project, env)


def update(project: Path, env: Env) -> None:
    said = cruft("update", "--skip-apply-ask", cwd=project, env=env)
    assert "has been updated" in said
    assert "Next:" not in said  # which is for a new project
    git("diff", "--check", cwd=project, env=env)  # fails on conflict markers
    assert not list(project.rglob("*.rej"))


MINE = "def train_one_epoch(", "# mine\n\n\ndef train_one_epoch("


@pytest.mark.parametrize("account", ["", "name:password@"])
def test_from_github(repository: Repository, tmp_path: Path, account: str) -> None:
    """The README's command, with git told to look for github.com in a folder."""
    address = "gh:org/ddp-template"
    if account:
        address = f"https://{account}github.com/org/ddp-template"
    project = cookiecutter(address, cwd=tmp_path, env=repository[1])
    assert os.access(project / "launch.sh", os.X_OK)
    # An address that git can clone again, without the account; no path of this machine.
    assert cruft_file(project)["template"].removesuffix(".git") == ADDRESS
    text = (project / ".cruft.json").read_text()
    assert str(tmp_path) not in text
    assert "password" not in text
    cruft("check", cwd=project, env=repository[1])


def test_next_steps_on_windows(
    repository: Repository, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """There git makes a file of the link to the library, and there is no bash."""
    _, env = repository
    env = {**env, "GIT_CONFIG_KEY_3": "core.symlinks", "GIT_CONFIG_VALUE_3": "false"}
    env |= {"GIT_CONFIG_COUNT": "4", "PYTHONPATH": str(ROOT / "tests/windows")}
    project = cookiecutter("gh:org/ddp-template", cwd=tmp_path, env=env)
    assert not (project / "ddpkit").exists()
    assert "@ git+https://" in requirements(project)
    assert capfd.readouterr().out.endswith("  python -m ddpkit launch main.py\n")


def test_a_fork(repository: Repository, tmp_path: Path) -> None:
    """Its projects require its ddpkit, and link to its own pages."""
    project = cookiecutter("gh:my-lab/ddp-template", cwd=tmp_path, env=repository[1])
    fork = "my-lab.github.io/ddp-template/"
    for name in "README.md", "AGENTS.md", "EDITS.md":
        text = (project / name).read_text()
        assert fork in text, name
        assert "org.github.io" not in text, name
        assert "github.com/org" not in text, name
    assert "git+https://github.com/my-lab/ddp-template" in requirements(project)
    cruft("check", cwd=project, env=repository[1])


def test_a_release(repository: Repository, tmp_path: Path) -> None:
    """`--checkout v3.0.0` has what that tag has; package, changelog and main.py agree on it.

    Once ddpkit is in the package index, a project requires releases of it.
    """
    origin, env = repository
    tag = f"v{__version__}"
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == __version__
    heading = f"\n## {__version__}\n\n{cited['date-released']}\n"
    assert heading in (ROOT / "CHANGELOG.md").read_text()
    (needs,) = re.findall(
        'needs="(.+?)"', (ROOT / TEMPLATE_FOLDER / "main.py").read_text()
    )
    assert f"{__version__}.".startswith(f"{needs.split('.')[0]}.")
    numbers = [tuple(map(int, each.split("."))) for each in (needs, __version__)]
    assert numbers[0] <= numbers[1]
    git("tag", tag, cwd=origin, env=env)
    tagged = git("rev-parse", tag, cwd=origin, env=env).strip()
    hook = origin / "hooks/post_gen_project.py"
    text = hook.read_text()
    assert text.count('\nRELEASES = ""\n') == 1
    hook.write_text(text.replace('RELEASES = ""', 'RELEASES = ">=3,<4"'))
    commit(origin, env)
    project = cookiecutter(ADDRESS, "--checkout", tag, cwd=tmp_path, env=env)
    assert f"ddpkit[classification] @ git+{ADDRESS}" in requirements(project)
    assert f"@{tagged}\n" in requirements(project)
    shutil.rmtree(project)
    cookiecutter(ADDRESS, cwd=tmp_path, env=env)
    assert "ddpkit[classification]>=3,<4" in requirements(project).splitlines()
    assert not (project / "ddpkit").exists()


def test_the_release_workflow(repository: Repository, tmp_path: Path) -> None:
    """Its step makes the release of a new version once, with its part of the changelog.

    It fails where there is none, and comes after the tests of the same commit.
    """
    origin, env = repository
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    # PyYAML reads "on" as True.
    assert workflow[True].keys() == {"workflow_run"}
    assert "conclusion == 'success'" in workflow["jobs"]["release"]["if"]
    (step,) = [each for each in workflow["jobs"]["release"]["steps"] if "id" in each]
    gh = tmp_path / "bin" / "gh"
    gh.parent.mkdir()
    gh.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$RUNNER_TEMP/words"\n')
    gh.chmod(0o755)
    env = {**env, "PATH": f"{gh.parent}:{env['PATH']}", "RUNNER_TEMP": str(tmp_path)}
    env |= {"COMMIT": "abc", "GITHUB_OUTPUT": str(tmp_path / "output")}
    command = ["bash", "-euo", "pipefail", "-c", step["run"]]
    tag = f"v{__version__}"
    subprocess.run(command, cwd=origin, env=env, check=True)
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:5] == ["release", "create", tag, "--target", "abc"]
    notes = (tmp_path / "notes.md").read_text()
    _, rest = (ROOT / "CHANGELOG.md").read_text().split(f"\n## {__version__}\n")
    assert notes.strip() == rest.split("\n## ")[0].strip()
    assert (tmp_path / "output").read_text() == f"tag={tag}\n"
    (tmp_path / "words").unlink()
    page = origin / "CHANGELOG.md"
    page.write_text(page.read_text().replace(f"## {__version__}\n", "## 0.0.0\n"))
    done = subprocess.run(command, cwd=origin, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"nothing under ## {__version__}" in done.stdout
    assert not (tmp_path / "words").exists()
    git("tag", tag, cwd=origin, env=env)
    subprocess.run(command, cwd=origin, env=env, check=True)
    assert not (tmp_path / "words").exists()


def test_update(repository: Repository, tmp_path: Path) -> None:
    """An owner's edits and the template's changes both end up in a project of cookiecutter's."""
    origin, env = repository
    project = cookiecutter(origin, "task=segmentation", cwd=tmp_path, env=env)
    edit(project, env, dataset=("STRIDE = 32", "STRIDE = 64"), main=MINE)
    for name in "main.py", "tasks/segmentation/model.py":
        with open(origin / TEMPLATE_FOLDER / name, "a") as file:
            file.write("# newer\n")
    newest = commit(origin, env)
    with pytest.raises(subprocess.CalledProcessError):
        cruft("check", cwd=project, env=env)
    update(project, env)
    assert "STRIDE = 64" in (project / "dataset.py").read_text()
    assert "# mine\n" in (project / "main.py").read_text()
    for name in "main.py", "model.py":
        assert (project / name).read_text().endswith("# newer\n")
    assert not (project / "tasks").exists()
    assert cruft_file(project)["commit"] == newest
    cruft("check", cwd=project, env=env)


def test_an_added_dependency(repository: Repository, tmp_path: Path) -> None:
    """`uv add` puts it last, as the list is not sorted: no update changes the line before it."""
    origin, env = repository
    project = cookiecutter("gh:org/ddp-template", cwd=tmp_path, env=env)
    path = project / "pyproject.toml"
    text = path.read_text()
    listed = text.partition("dependencies = [\n")[2].partition("\n]")[0]
    assert sorted(listed.splitlines()) != listed.splitlines()
    path.write_text(text.replace(listed, f'{listed}\n  "einops>=0.8",'))
    edit(project, env)
    with open(origin / TEMPLATE_FOLDER / "main.py", "a") as file:
        file.write("# newer\n")
    newest = commit(origin, env)
    update(project, env)
    assert '  "einops>=0.8",\n]' in path.read_text()
    assert f'@{newest}"' in path.read_text()


def copier(*words: object, cwd: Path, env: Env) -> str:
    """Run it, and return what it and the hook have printed."""
    command = [sys.executable, "-m", "copier", *words, "--defaults", "--trust"]
    options = {"check": True, "capture_output": True, "text": True}
    return subprocess.run(command, cwd=cwd, env=env, **options).stdout


def test_copier(repository: Repository, tmp_path: Path) -> None:
    """It generates what cookiecutter does, and updates it, with an owner's edits."""
    origin, env = repository
    git("tag", "v1.0.0", cwd=origin, env=env)
    fork = "my-lab/ddp-template"
    project = cookiecutter(f"gh:{fork}", "task=segmentation", cwd=tmp_path, env=env)
    same = tmp_path / "by_copier" / project.name
    words = ["copy", "--data", "task=segmentation", f"gh:{fork}", same]
    assert "  cd my_ddp_project\n  uv sync\n" in copier(*words, cwd=tmp_path, env=env)
    compared = filecmp.dircmp(project, same)
    assert compared.left_only == [".cruft.json"]
    assert compared.right_only == [".copier-answers.yml"]
    folders = [compared]
    while folders:
        folder = folders.pop()
        folders += folder.subdirs.values()
        assert not folder.diff_files
        assert folder is compared or not folder.left_only + folder.right_only
    edit(same, env, main=MINE)
    with open(origin / TEMPLATE_FOLDER / "main.py", "a") as file:
        file.write("# newer\n")
    commit(origin, env)
    git("tag", "v1.1.0", cwd=origin, env=env)
    assert "Next:" not in copier("update", cwd=same, env=env)
    text = (same / "main.py").read_text()
    assert "# mine\n" in text
    assert text.endswith("# newer\n")
    git("diff", "--check", cwd=same, env=env)
    other = tmp_path / "other"
    words = ["copy", f"git+https://github.com/{fork}", other]
    copier(*words, cwd=tmp_path, env=env)
    assert f"@ git+https://github.com/{fork}@" in requirements(other)


def test_answers_to_copier(repository: Repository, tmp_path: Path) -> None:
    """It takes those that cookiecutter takes; a name without ASCII letters has a slug, too."""
    origin, env = repository
    project = tmp_path / "project"

    def copy(answer: str) -> None:
        words = ["copy", "--vcs-ref", "HEAD", "--data", answer, origin, project]
        copier(*words, cwd=tmp_path, env=env)

    slugs = (r"..\x", "3d:_cracks?", "o'brien's_net", "été", "-dash", "a\n", "")
    for answer in (
        *(f"project_slug={slug}" for slug in slugs),
        "author=",
        "project_name= ",
    ):
        with pytest.raises(subprocess.CalledProcessError) as caught:
            copy(answer)
        assert answer.split("=")[0] in caught.value.stderr
        assert not project.exists()
    slugs = {"日本語": "my-project", "3D: Cracks?": "3d-cracks"}
    page = (ROOT / "docs/library.md").read_text()
    assert "(日本語: `my_project`, not `ri_ben_yu`)" in page
    for name, slug in slugs.items():
        copy(f"project_name={name}")
        assert f'\nname = "{slug}"\n' in (project / "pyproject.toml").read_text()
        shutil.rmtree(project)
    cookiecutter(origin, "project_name=日本語", cwd=tmp_path, env=env)
    assert (tmp_path / "ri_ben_yu").exists()


def test_cruft_file(
    repository: Repository, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """What cruft itself writes, and nothing where it would be wrong, which is said."""
    origin, env = repository
    (tmp_path / "by_cruft").mkdir()
    words = ["create", origin, "--checkout", "main", "--no-input"]
    assert "Next:" in cruft(*words, cwd=tmp_path / "by_cruft", env=env)
    address = Path("origin") / origin.name  # a relative one
    project = cookiecutter(address, "--checkout", "main", cwd=tmp_path, env=env)
    assert cruft_file(project) == cruft_file(tmp_path / "by_cruft" / "my_ddp_project")

    assert "No .cruft.json" not in capfd.readouterr().out
    # The relative path of a command that generates elsewhere, as a shell starts it.
    shell = {**env, "PWD": str(tmp_path)}
    cookiecutter(address, "-o", "elsewhere", cwd=tmp_path, env=shell)
    found = cruft_file(tmp_path / "elsewhere" / project.name)
    assert found == {**cruft_file(project), "checkout": None}
    shutil.rmtree(project)

    def check_notice(words: str, *more: str) -> None:
        cookiecutter(*more or [address], "-f", cwd=tmp_path, env=env)
        said = capfd.readouterr().out
        assert "No .cruft.json" in said
        assert said.endswith(f"{words}.\n")
        assert not (project / ".cruft.json").exists()

    env = {**env, "PWD": "/"}  # of a program that has changed the folder
    elsewhere = "-o", str(tmp_path / "third")
    check_notice("could not be resolved: use its absolute path", address, *elsewhere)
    (origin / TEMPLATE_FOLDER / "newest.txt").write_text("in no commit")
    name = f"{TEMPLATE_FOLDER}/newest.txt"
    check_notice(f"uncommitted changes ({name}): commit them, then try again")
    assert (project / "newest.txt").exists()
    shutil.rmtree(origin / ".git")
    check_notice("not a git repository: generate from its https:// address")


def test_checkout_of_a_folder(repository: Repository, tmp_path: Path) -> None:
    """cookiecutter ignores it there and for archives: an error, unless it is that commit."""
    origin, env = repository
    git("tag", "v1.0.0", cwd=origin, env=env)
    tagged = git("rev-parse", "HEAD", cwd=origin, env=env).strip()
    with open(origin / TEMPLATE_FOLDER / "main.py", "a") as file:
        file.write("# newer\n")
    commit(origin, env)
    archive = tmp_path / "template.zip"
    git("archive", "--prefix=main/", "--output", archive, "HEAD", cwd=origin, env=env)
    project = tmp_path / "my_ddp_project"
    for source in origin, archive:
        command = [sys.executable, "-m", "cookiecutter", source, "--no-input"]
        command += ["--checkout", "v1.0.0"]
        options = {"capture_output": True, "text": True}
        done = subprocess.run(command, cwd=tmp_path, env=env, **options)
        assert done.returncode == 1
        (line,) = [each for each in done.stderr.splitlines() if "error: " in each]
        assert f"{source} is not at v1.0.0" in line
        assert not project.exists()
    words = "--checkout", "v1.0.0"
    for source in origin.as_uri(), origin:
        cookiecutter(source, *words, cwd=tmp_path, env=env)
        assert cruft_file(project)["commit"] == tagged
        assert not (project / "main.py").read_text().endswith("# newer\n")
        shutil.rmtree(project)
        git("checkout", "--quiet", "v1.0.0", cwd=origin, env=env)


def test_an_abbreviation_of_a_folder(repository: Repository, tmp_path: Path) -> None:
    """Of a clone with a commit that its remote does not have: the project needs no such commit."""
    _, env = repository
    git("clone", "--quiet", ADDRESS, tmp_path / "clone", cwd=tmp_path, env=env)
    config = tmp_path / "cookiecutter.yaml"
    known = Path(env["COOKIECUTTER_CONFIG"]).read_text()
    config.write_text(f"{known}abbreviations:\n  me: {tmp_path}/{{0}}\n")
    env = {**env, "COOKIECUTTER_CONFIG": str(config)}
    project = cookiecutter("me:clone", cwd=tmp_path, env=env)
    assert cruft_file(project)["template"] == f"{ADDRESS}"
    shutil.rmtree(project)
    with open(tmp_path / "clone" / TEMPLATE_FOLDER / "main.py", "a") as file:
        file.write("# mine\n")
    commit(tmp_path / "clone", env)
    cookiecutter("me:clone", cwd=tmp_path, env=env)
    assert cruft_file(project)["template"] == str(tmp_path / "clone")
    assert (project / "ddpkit" / "__init__.py").is_file()


@pytest.mark.parametrize("link", ["a file", "an empty folder", "nothing"])
def test_from_an_archive(repository: Repository, tmp_path: Path, link: str) -> None:
    """Where the link to the library is a file with its name, as in GitHub's, or worse."""
    origin, env = repository
    archive = tmp_path / "template.zip"
    git("archive", "--prefix=main/", "--output", archive, "HEAD", cwd=origin, env=env)
    if link != "a file":
        shutil.unpack_archive(archive, tmp_path / "unpacked")
        library = tmp_path / "unpacked" / "main" / TEMPLATE_FOLDER / "ddpkit"
        library.unlink()
        if link == "an empty folder":
            library.mkdir()
        archive = shutil.make_archive(
            str(tmp_path / "other"), "zip", tmp_path / "unpacked", "main"
        )
    project = cookiecutter(archive, cwd=tmp_path, env=env)
    assert os.access(project / "launch.sh", os.X_OK)
    assert not (project / ".cruft.json").exists()
    files = [path for path in (origin / "ddpkit").rglob("*") if path.is_file()]
    copies = [project / path.relative_to(origin) for path in files]
    for path, copy in zip(files, copies, strict=True):
        assert copy.read_bytes() == path.read_bytes()
