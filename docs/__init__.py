"""Pages of the documentation, and programs that make plots and tables of them."""
