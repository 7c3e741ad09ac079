// The work-touch: read device memory with a stride for every generated token.
//
// The parts count as one ring of `size` bytes, one after another. Token t = 0, 1, ... reads the
// bytes at (t * per_token + k * stride) % size for every k >= 0 with k * stride < per_token. The
// checksum is the sum of all bytes read, modulo 2^64; integers add up to the same in any order.

typedef unsigned long long u64;

// What a ring keeps between launches.
struct State {
    u64 tokens;    // touched so far
    u64 checksum;
    u64 position;  // where the next token begins: tokens * per_token % size
    u64 arrived;   // blocks of this launch that are done; 0 before and after
};

// Return the part that a position of the ring is in: the first one that ends beyond it.
__device__ unsigned find_part(const u64 *ends, unsigned parts, u64 at)
{
    unsigned low = 0, high = parts - 1;
    while (low < high) {
        unsigned middle = (low + high) / 2;
        if (ends[middle] > at)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

// Touch for `tokens` tokens. bases [parts]: addresses of the parts. ends [parts]: where they end
// in the ring. A block has whole warps.
extern "C" __global__ void work_touch(const u64 *bases, const u64 *ends, unsigned parts,
                                      u64 per_token, u64 stride, unsigned tokens, State *state)
{
    const u64 size = ends[parts - 1];
    const u64 reads = (per_token + stride - 1) / stride;
    const u64 first = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    const u64 threads = gridDim.x * (u64)blockDim.x;
    u64 begin = *(volatile u64 *)&state->position;
    u64 sum = 0;
    for (unsigned token = 0; token < tokens; token++) {
#pragma unroll 4
        for (u64 k = first; k < reads; k += threads) {
            u64 at = begin + k * stride;
            if (at >= size)
                at %= size;
            unsigned part = find_part(ends, parts, at);
            u64 offset = part ? at - ends[part - 1] : at;
            sum += ((const unsigned char *)bases[part])[offset];
        }
        begin = (begin + per_token) % size;
    }

    for (int apart = 16; apart; apart /= 2)
        sum += __shfl_down_sync(0xffffffffu, sum, apart);
    if (threadIdx.x % 32 == 0)
        atomicAdd(&state->checksum, sum);
    __syncthreads();
    // When the last block arrives, all have read the position, so it may be stepped on.
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicAdd(&state->arrived, 1ull) == gridDim.x - 1) {
            state->tokens += tokens;
            state->position = begin;
            state->arrived = 0;
        }
    }
}
