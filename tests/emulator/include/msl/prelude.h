// Host stand-in for <metal_stdlib>, put before every kernel. Two front ends of clang share it.
//
//  * C++ (the one that runs): address spaces are clang's opencl_global / opencl_local /
//    opencl_constant type attributes, an unqualified pointer is `thread`, and mixing them is a type
//    error. x86-64 and aarch64 lower all of them to the one flat memory, so the code runs.
//  * C++ for OpenCL 2021 (-x clcpp, generic address space on, fp64 off): also understands
//    address-space qualified member functions, and rejects double, virtual, function pointers,
//    static locals, VLAs, new, exceptions and mutable globals, as Metal does.
//
// A name that Metal lacks must not be declared here: a kernel that uses it has to fail.
#pragma once
#pragma clang system_header
#include "language.h"
#include "runtime.h"
#include "traits.h"
#include "vector.h"
#include "limits.h"
#include "math.h"
#include "simd.h"
#include "matrix.h"
#include "atomic.h"
#include "entry.h"
