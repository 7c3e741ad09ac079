"""Print what `cuda_aot_pages` prints, for every KV dtype and every architecture."""

from cuda_aot_pages import main

if __name__ == "__main__":
    main(every=True)
