"""optclip inside the libraries that people train, save and log with."""
