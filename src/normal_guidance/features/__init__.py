"""Image encoders, and the feature store on disk that training reads memory-mapped."""
