"""Scripts that measure paw.py, and the plotting that they share with `paw.py --plot`."""
