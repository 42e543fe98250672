#!/usr/bin/env bash
# Runs the own tests of the projects that the last two releases of this major version generate, on
# today's ddpkit.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
python=$PWD/${VENV:-.venv}/bin/python
major=$(sed -n 's/^__version__ = "\([0-9]*\)\..*/\1/p' ddpkit/version.py)
tags=$(git tag --list "v$major.*" --sort=-version:refname | head -n 2)
if [[ -z $tags ]]; then
    echo "no release of version $major yet: nothing to compare with"
fi
for tag in $tags; do
    folder=$(mktemp -d)
    mkdir "$folder/template"
    git archive "$tag" | tar -x -C "$folder/template"
    for task in classification segmentation; do
        "$python" -m cookiecutter "$folder/template" --no-input -o "$folder" "task=$task" "project_slug=$task"
        rm -r "${folder:?}/$task/ddpkit"
        cp -r ddpkit "$folder/$task/ddpkit"
        echo "$tag, $task:"
        (cd "$folder/$task" && "$python" -m pytest)
    done
    rm -r "$folder"
done
