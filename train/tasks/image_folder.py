"""Classification of a folder of images by a ResNet."""

from pathlib import Path

from train.data.image_files import read_image_folder
from train.fields import checked
from train.tasks.labelled_images import LabelledOptions, labelled_images
from train.tasks.task import Task


@checked
class ImageFolderTask(LabelledOptions):
    """Classification of JPEG and PNG files, in a folder for each class.

    Args:
      data: folder of the folders of the classes, or of `train` and `validation` with
        such folders.
    """

    data: str

    def build(self) -> Task:
        folder, share = Path(self.data), self.held_out_share
        return labelled_images(lambda: read_image_folder(folder, share), self)
