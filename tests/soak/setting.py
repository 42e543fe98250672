"""What all cases of a soak share: both kinds of project, and data for them, each made once."""

import os
import subprocess
import sys
from pathlib import Path

from generated import ROOT, TASKS, Project

from ddpkit import files

# more labels
OF = {"bricks": "square", "checks": "square", "dots": "round", "rings": "round"}


class Setting:
    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.folder = folder
        self.projects = {task: self.generate(task) for task in TASKS}
        self.data = {task: self.draw(task, 26, 7) for task in TASKS}
        several = self.draw(TASKS[0], 26, 7, "several labels")
        self.data["several labels"] = self.lists(several)

    def generate(self, task: str) -> Project:
        """Generate a project as a person does; it imports this repository's ddpkit."""
        parent = self.folder / f"a path with a space, {task}"
        parent.mkdir(parents=True)
        home = self.folder / "home.yaml"
        home.write_text(
            f"replay_dir: {self.folder}/replay\ncookiecutters_dir: {self.folder}/c\n"
        )
        command = [sys.executable, "-m", "cookiecutter", ROOT, "--no-input"]
        command += ["-o", parent, f"task={task}"]
        env = {**os.environ, "COOKIECUTTER_CONFIG": str(home)}
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        folder = parent / "my_ddp_project"
        copy = folder / "ddpkit"
        copy.rename(parent / "copied ddpkit")
        copy.symlink_to(ROOT / "ddpkit")  # which this process has imported
        return Project(folder, task)

    def draw(self, task: str, train: int, val: int, name: str = "") -> Path:
        folder = self.folder / f"set of {name or task}"
        return self.projects[task].draw(folder, train, val)

    def lists(self, data: Path) -> Path:
        """Give images of a set of class folders one label, two, or none, in groups."""
        for part in "train", "val":
            with files.table(data / f"{part}.csv", ["file", "label", "group"]) as write:
                for n, path in enumerate(sorted((data / part).rglob("*.jpg"))):
                    kind = path.parent.name
                    labels = [] if kind == "waves" else [kind]
                    if kind in OF:
                        labels.append(OF[kind])
                    name = path.relative_to(data)
                    write([name, ";".join(labels) or ";", f"camera {n % 9}"])
        return data
