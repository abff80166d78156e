"""What only a node of GPUs needs: vLLM, gpt-oss-120b, the plan of a run, the annotation of real pages."""
