"""The demo: three trained role adapters solve one question over one growing trajectory."""
