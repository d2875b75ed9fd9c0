// The paged KV cache: blocks of every layer in one arena, zero-filled (what was never written must not be NaN).
#pragma once

#include <cstring>
#include <vector>

#include "arena.h"
#include "kernels.h"

namespace octavo {

class KVCache {
public:
    // Without values where `latent` is more than 0; see KVSpec in octavo/ops/contract.py.
    KVCache(int kv_heads, int head_dim, int latent, bool half, int block_size, const std::vector<int>& blocks,
            const std::vector<int>& group_of)
        : kv_heads(kv_heads),
          head_dim(head_dim),
          half(half),
          block_size(block_size),
          blocks(blocks),
          group_of(group_of) {
        const int64_t block_bytes = int64_t{latent > 0 ? 1 : 2} * kv_heads * head_dim * block_size * (half ? 2 : 4);
        int64_t total = 0;
        for (const int group : group_of) total += blocks[group] * block_bytes;
        arena_ = Arena(total);
        uint8_t* at = arena_.data();
        for (const int group : group_of) {
            layers.push_back({at, block_bytes});
            at += blocks[group] * block_bytes;
        }
    }

    void copy_block(int group, int source, int destination) {
        if (source == destination) return;
        for (size_t layer = 0; layer < layers.size(); ++layer) {
            if (group_of[layer] != group) continue;
            const LayerCache& cache = layers[layer];
            std::memcpy(cache.data + destination * cache.block_bytes, cache.data + source * cache.block_bytes,
                        cache.block_bytes);
        }
    }

    size_t bytes() const { return arena_.size(); }

    const int kv_heads;
    const int head_dim;
    const bool half;
    const int block_size;
    const std::vector<int> blocks;    // per group
    const std::vector<int> group_of;  // per layer
    std::vector<LayerCache> layers;

private:
    Arena arena_;
};

}  // namespace octavo
