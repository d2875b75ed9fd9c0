// The paged KV cache: blocks in one arena, zero-filled (what was never written must not be NaN). A block holds its
// tokens of all layers of the group, one after the other, so that blocks in use take no more huge pages than they fill.
#pragma once

#include <cstring>
#include <vector>

#include "arena.h"
#include "kernels.h"

namespace octavo {

class KVCache {
public:
    // Without values where `latent` is more than 0; see KVSpec in octavo/ops/contract.py. `scales`: of the keys of each
    // head, then of the values, for each layer. `memory_nodes`: those of the system that the blocks are spread over,
    // for any worker may read any block; empty: a page lies where it is first written.
    KVCache(int kv_heads, int head_dim, int latent, CacheType type, int block_size, const std::vector<int>& blocks,
            const std::vector<int>& group_of, const std::vector<std::vector<float>>& scales,
            const std::vector<int>& memory_nodes)
        : kv_heads(kv_heads),
          head_dim(head_dim),
          type(type),
          head_bytes(int64_t{block_size} * (head_dim * kCacheTypes[type].bytes + kCacheTypes[type].scale_bytes)),
          block_size(block_size),
          block_bytes(int64_t{latent > 0 ? 1 : 2} * kv_heads * head_bytes),
          blocks(blocks),
          group_of(group_of),
          scales_(scales) {
        std::vector<int64_t> strides(blocks.size());  // of each group
        for (const int group : group_of) strides[group] += block_bytes;
        std::vector<int64_t> next(blocks.size());  // offset of each group's next layer
        int64_t total = 0;
        for (size_t group = 0; group < blocks.size(); ++group) {
            next[group] = total;
            total += blocks[group] * strides[group];
        }
        arena_ = Arena(total);
        arena_.interleave(memory_nodes);
        for (size_t layer = 0; layer < group_of.size(); ++layer) {
            const float* own = scales_[layer].data();
            const int group = group_of[layer];
            layers.push_back({arena_.data() + next[group], strides[group], own, latent > 0 ? own : own + kv_heads});
            next[group] += block_bytes;
        }
    }

    void copy_block(int group, int source, int destination) {
        if (source == destination) return;
        for (size_t layer = 0; layer < layers.size(); ++layer) {
            if (group_of[layer] != group) continue;
            const LayerCache& cache = layers[layer];
            std::memcpy(cache.data + destination * cache.block_stride, cache.data + source * cache.block_stride,
                        block_bytes);
        }
    }

    size_t bytes() const { return arena_.size(); }

    const int kv_heads;
    const int head_dim;
    const CacheType type;
    const int64_t head_bytes;  // what the keys, or the values, of a head take in a block
    const int block_size;
    const int64_t block_bytes;        // in one layer
    const std::vector<int> blocks;    // per group
    const std::vector<int> group_of;  // per layer
    std::vector<LayerCache> layers;

private:
    const std::vector<std::vector<float>> scales_;
    Arena arena_;
};

}  // namespace octavo
