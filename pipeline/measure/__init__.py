"""What a machine and a loader do, and what to change first."""
