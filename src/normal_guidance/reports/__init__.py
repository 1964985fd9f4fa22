"""Tables, figures and pages that show results to a reader."""
