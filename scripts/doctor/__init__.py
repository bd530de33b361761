"""Doctor: checks a machine before anything is trained on it. Needs nothing installed; torch is asked in processes."""
