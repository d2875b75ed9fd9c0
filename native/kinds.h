// How weights are stored: in the checkpoint (ggml blocks) and in our panels.
//
// A panel holds 8 rows of a matrix (8 output columns of the product) in cells of 32 elements of K. Inside a cell the
// bytes are ordered [quad of k][column][k in quad]: one 32-byte register holds four k of all eight columns, so a
// 4-byte broadcast of an activation meets every column at once and output columns live in SIMD lanes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

enum Kind : int { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4, Q4_K, Q5_K, Q6_K, KIND_COUNT };

constexpr int kColumns = 8;       // columns of a panel
constexpr int kCell = 32;         // K elements of a cell
constexpr int kTileColumns = 32;  // output columns of a work item: four panels

// A panel is a run of units; a unit is a head (super-block scales, K formats only) and `unit_cells` cells.
struct KindInfo {
    const char* name;
    int block;        // elements per block in the file
    int block_bytes;  // bytes per block in the file
    int head_bytes;
    int unit_cells;
    int cell_bytes;
};

// Planes of a cell, in this order after its own meta data: N4 (128 bytes: low nibble = quad r, high = quad r + 4),
// B1 (32: bit q of a byte is the fifth bit of quad q), B2 (64: bits 4-5, four quads per register), B8 (256: k pairs).
constexpr KindInfo kKinds[KIND_COUNT] = {
    {"F32", 1, 4, 0, 1, 1024},
    {"F16", 1, 2, 0, 1, 512},
    {"BF16", 1, 2, 0, 1, 512},
    {"Q4_0", 32, 18, 0, 1, 16 + 128},          // d | N4
    {"Q4_1", 32, 20, 0, 1, 32 + 128},          // d m | N4
    {"Q5_0", 32, 22, 0, 1, 16 + 128 + 32},     // d | N4 B1
    {"Q5_1", 32, 24, 0, 1, 32 + 128 + 32},     // d m | N4 B1
    {"Q8_0", 32, 34, 0, 1, 16 + 256},          // d | B8
    {"MXFP4", 32, 17, 0, 1, 8 + 128},          // e | N4
    {"Q4_K", 256, 144, 32, 8, 16 + 128},       // head d dmin; sc mn | N4
    {"Q5_K", 256, 176, 32, 8, 16 + 128 + 32},  // head d dmin; sc mn | N4 B1
    {"Q6_K", 256, 210, 16, 8, 16 + 128 + 64},  // head d; sc of either half | N4 B2
};

// Rows of a matrix in one format, packed.
struct Panels {
    const uint8_t* data;
    int64_t panel_bytes;
    int n_out;
    int n_in;
    int kind;
};

}  // namespace octavo
