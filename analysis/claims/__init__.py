"""What practitioners say about batch size, each as a declared test with a verdict."""
