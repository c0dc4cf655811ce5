"""Two machines for tests: network namespaces joined by a pair of virtual interfaces."""
