"""An engine that says much, and does not start."""

if __name__ == "__main__":
    for number in range(1, 50):
        print(f"line {number}")
    raise SystemExit("the KV cache does not fit")
