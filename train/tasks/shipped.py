"""The tasks that come with the program, by the names that a run's config.json has.

Imported when they are used: each needs a model, and most commands need no task.
"""

import importlib
from typing import Any

MODULES = {
    "StdlibTask": "stdlib",
    "DigitsTask": "digits",
    "NumbersTask": "numbers",
    "ImageNetTask": "imagenet",
    "ImageFolderTask": "image_folder",
    "HubImagesTask": "hub_images",
    "TranslationTask": "corpus",
    "TextTask": "text",
    "HubTextTask": "hub_text",
}


def shipped_task(name: str) -> Any:
    """Returns the class of a task, by its name."""
    return getattr(importlib.import_module(f"train.tasks.{MODULES[name]}"), name)


def is_shipped(kind: type) -> bool:
    """Whether a class of a task comes with the program."""
    return kind.__module__ == f"train.tasks.{MODULES.get(kind.__name__)}"
