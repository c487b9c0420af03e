"""Sources of engines: flags, a file, DNS, Kubernetes. The interface is source.py."""
