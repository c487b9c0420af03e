"""Bytes: the HTTP/1.1 connections to engines and what comes back on them."""
