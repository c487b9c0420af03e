"""What happens to one request, one file per plan, written once for every front."""
