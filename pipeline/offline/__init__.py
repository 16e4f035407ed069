"""The offline half: videos to frames and their manifest, once. Loads PyAV and joblib, never torch."""
