"""Programs that draw plots and write tables of the pages in `docs`."""
