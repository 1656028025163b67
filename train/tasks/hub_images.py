"""Classification of the images of a Hugging Face dataset by a ResNet."""

from train.data.hub_datasets import read_images, read_splits
from train.data.image_files import Labelled
from train.fields import checked
from train.tasks.labelled_images import LabelledOptions, labelled_images
from train.tasks.task import Task


@checked
class HubImagesTask(LabelledOptions):
    """Classification of a dataset with a column of images and one of classes.

    Args:
      data: folder that `save_to_disk` has written, else a name on the hub.
      subset: name of one of several subsets on the hub.
      image: name of the column of images.
      label: name of the column of classes.
    """

    data: str
    subset: str | None = None
    image: str = "image"
    label: str = "label"

    def build(self) -> Task:
        def read() -> Labelled:
            splits = read_splits(self.data, self.subset, self.held_out_share)
            return read_images(splits, self.image, self.label)

        return labelled_images(read, self)
