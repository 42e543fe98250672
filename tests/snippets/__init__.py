"""Functions that tests call within a generated project: Project.call("module.function", ...).

They take and return what JSON can hold. Each call has a process of its own, so they may change
what they like of the project's modules.
"""
