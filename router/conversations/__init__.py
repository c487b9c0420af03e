"""What a turn leaves for the next: who may take it, where it is kept, how much of it is safe."""
