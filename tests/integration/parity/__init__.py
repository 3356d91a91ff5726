"""Compare optclip with TensorFlow, Keras, PyTorch and optax."""
