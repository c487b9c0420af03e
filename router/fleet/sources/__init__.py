"""Where engines are known from: flags, a file, DNS, Kubernetes."""
