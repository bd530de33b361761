"""Inference: batches through a trained or fresh model, timed under the same strategies and ruler as training."""
