"""Put the chosen task's files in place, drop the others, and say what to type next."""

import shutil
from pathlib import Path

TASK = "{{ cookiecutter.task }}"
SLUG = "{{ cookiecutter.project_slug }}"

tasks = Path("tasks")
for path in (tasks / TASK).glob("*"):
    path.replace(path.name)
shutil.rmtree(tasks, ignore_errors=True)
Path("launch.sh").chmod(0o755)  # an archive may have lost it

print(
    f"""
Next:
  cd {SLUG}
  python -m pip install -r requirements.txt
  ./launch.sh"""
)
