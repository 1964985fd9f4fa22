"""How good predictions are: localization of slices, classification of scans."""
