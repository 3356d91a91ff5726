"""optclip beside the real TensorFlow, Keras, PyTorch and optax."""
