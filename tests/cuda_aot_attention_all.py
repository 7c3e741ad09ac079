"""Print what `cuda_aot_attention` prints, for every KV dtype and every architecture."""

from cuda_aot_attention import main

if __name__ == "__main__":
    main(every=True)
