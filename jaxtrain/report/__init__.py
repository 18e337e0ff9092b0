"""What a run shows of itself: pictures of rows, the confusion matrix, the one-file HTML report."""

from jaxtrain.report.confusion import confusion_image
from jaxtrain.report.html import write_report
from jaxtrain.report.samples import save_wrong_samples, training_samples

__all__ = ["confusion_image", "save_wrong_samples", "training_samples", "write_report"]
