"""What a repro folder imports: one operator's traced inputs, run again outside the model in the way each side ran it."""
