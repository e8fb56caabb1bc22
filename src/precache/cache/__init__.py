"""The shared cache: buffers of one trajectory, the store of all of them, and their memory budget."""
