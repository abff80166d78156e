"""What only a node of GPUs needs: vLLM, gpt-oss-120b, the annotation of real pages."""
