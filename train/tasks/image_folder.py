"""Classification of a folder of images by a ResNet."""

import functools
from pathlib import Path
from typing import Self

from train.data.image_files import read_image_folder
from train.fields import checked
from train.tasks.labelled_images import LabelledOptions, labelled_images
from train.tasks.task import Task


@checked
class ImageFolderTask(LabelledOptions):
    """Classification of JPEG and PNG files, in a folder for each class.

    The model knows as many classes as it says, and at least those of the folder.

    Args:
      data: folder of the folders of the classes, or of `train` and `validation` with
        such folders, see `read_image_folder`.
    """

    data: str

    def build(self) -> Task:
        folder, share = Path(self.data), self.held_out_share
        read = functools.partial(read_image_folder, folder, share)
        return labelled_images(read, self.resolved())

    def resolved(self) -> Self:
        """The task with what its data decides: the number of classes."""
        folder = Path(self.data)
        if not folder.is_dir():  # A task is also built where its data is missing.
            return self
        return self.knowing(len(read_image_folder(folder, self.held_out_share).names))
