<!doctype html><style></style><script></script>
