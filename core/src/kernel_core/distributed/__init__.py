"""What engines over several processes share: joining, the mesh, agreement, norms, state. Imported by those engines only."""
