//! Kernels as they run: threads, barriers, collectives, tensor cores, and products of matrices.

use super::*;

#[test]
fn vectors_are_added_in_any_order() {
    let (sim, bench) = (alone(), Bench::new(ADD));
    let (x, y) = (numbers(1001), numbers(2002)[1001..].to_vec());
    let (at_x, at_y) = (bench.array(&x), bench.array(&y));
    for schedule in SCHEDULES {
        sim.set_schedule(schedule);
        let z = alloc(4 * 1001).expect("memory");
        let args = [Arg::Pointer(at_x), Arg::Pointer(at_y), Arg::Pointer(z), Arg::U32(1001)];
        bench.launch("add", (8, 128, 0), &args).expect("a launch");
        let z: Vec<f32> = bench.read(z, 1001);
        assert!(z.iter().zip(x.iter().zip(&y)).all(|(z, (x, y))| *z == x + y), "{schedule:?}");
    }
    assert_eq!(sim.calls("cuLaunchKernel"), 5);
    assert_eq!(sim.calls("kernel"), 5);
}

/// A tree over shared memory in a template; `SECOND` is the barrier that may be forgotten.
fn reduction(second: &str) -> String {
    format!(
        "template <u32 N> __device__ void reduce(const float* x, float* sums) {{
            __shared__ float part[N];
            part[threadIdx.x] = x[blockIdx.x * N + threadIdx.x];
            __syncthreads();
            for (u32 half = N / 2; half > 0; half /= 2) {{
                if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
                {second}
            }}
            if (threadIdx.x == 0) sums[blockIdx.x] = part[0];
        }}
        KERNEL(128) sums(const float* x, float* sums) {{ reduce<128>(x, sums); }}"
    )
}

#[test]
fn a_missing_barrier_shows_in_some_order() {
    let sim = alone();
    let x = numbers(3 * 128);
    let expected: Vec<f32> = x.chunks(128).map(|block| block.iter().sum()).collect();
    let mut wrong = [0, 0];
    for (wrong, second) in wrong.iter_mut().zip(["__syncthreads();", ""]) {
        let bench = Bench::new(&reduction(second));
        let at = bench.array(&x);
        for schedule in SCHEDULES {
            sim.set_schedule(schedule);
            let sums = alloc(12).expect("memory");
            bench.launch("sums", (3, 128, 0), &[Arg::Pointer(at), Arg::Pointer(sums)]).expect("a launch");
            let sums: Vec<f32> = bench.read(sums, 3);
            *wrong += usize::from(sums.iter().zip(&expected).any(|(got, sum)| (got - sum).abs() > 1e-2));
        }
    }
    assert_eq!(wrong[0], 0, "right with all barriers");
    assert!(wrong[1] > 0, "without one, wrong in at least one order");
}

#[test]
fn lanes_exchange_values() {
    let (sim, bench) = (
        alone(),
        Bench::new(
            "template <class T> __device__ void all(T* out, T x) {
                out[threadIdx.x] = __shfl_xor_sync(~0u, x, 5);
                out[64 + threadIdx.x] = __shfl_down_sync(~0u, x, 3u);
                out[128 + threadIdx.x] = __shfl_sync(~0u, x, 7);
                out[192 + threadIdx.x] = __shfl_sync(~0u, x, 1, 8);
            }
            KERNEL(64) words(u32* out) { all(out, threadIdx.x * 3 + 1); }
            KERNEL(64) wide(unsigned long long* out) { all(out, (threadIdx.x * 3 + 1) * 0x100000001ull); }
            KERNEL(64) doubles(double* out) { all(out, threadIdx.x * 3 + 1.0); }
            KERNEL(64) votes(u32* out) {
                u32 odd = threadIdx.x & 1, mine = __ballot_sync(~0u, odd);
                out[threadIdx.x] = mine + __any_sync(~0u, threadIdx.x == 40) + 2 * __all_sync(~0u, threadIdx.x < 32);
            }",
        ),
    );
    let source = |i: usize, which: usize| {
        let (warp, lane) = (i / 32 * 32, i % 32);
        warp + [lane ^ 5, if lane + 3 < 32 { lane + 3 } else { lane }, 7, lane / 8 * 8 + 1][which]
    };
    let expected: Vec<u32> = (0..256).map(|i| source(i % 64, i / 64) as u32 * 3 + 1).collect();
    for schedule in SCHEDULES {
        sim.set_schedule(schedule);
        let (words, wide, doubles) = (alloc(1024), alloc(2048), alloc(2048));
        let [words, wide, doubles] = [words, wide, doubles].map(|at| at.expect("memory"));
        for (name, at) in [("words", words), ("wide", wide), ("doubles", doubles)] {
            bench.launch(name, (1, 64, 0), &[Arg::Pointer(at)]).expect("a launch");
        }
        assert_eq!(bench.read::<u32>(words, 256), expected, "{schedule:?}");
        assert!(bench.read::<u64>(wide, 256).iter().zip(&expected).all(|(a, b)| *a == u64::from(*b) * 0x1_0000_0001));
        assert!(bench.read::<f64>(doubles, 256).iter().zip(&expected).all(|(a, b)| *a == f64::from(*b)));
        bench.launch("votes", (1, 64, 0), &[Arg::Pointer(words)]).expect("a launch");
        let votes: Vec<u32> = bench.read(words, 64);
        assert!(votes[..32].iter().all(|&vote| vote == 0xaaaa_aaaa + 2), "{votes:?}");
        assert!(votes[32..].iter().all(|&vote| vote == 0xaaaa_aaaa + 1), "{votes:?}");
    }
}

#[test]
fn fragments_of_the_tensor_cores_lie_as_defined() {
    // PTX ISA, mma.m16n8k16: a[row][k] row-major and b[column][k] as they lie in memory.
    let (sim, bench) = (
        alone(),
        Bench::new(
            "KERNEL(32) product(const u32* a, const u32* b, float* d, u32 bf16) {
                u32 g = threadIdx.x / 4, q = threadIdx.x % 4;
                u32 x[4] = {a[g * 8 + q], a[(g + 8) * 8 + q], a[g * 8 + q + 4], a[(g + 8) * 8 + q + 4]};
                u32 y[2] = {b[g * 8 + q], b[g * 8 + q + 4]};
                float z[4] = {1, 2, 3, 4};
                simt_mma_16816(z, x, y, bf16);
                d[g * 8 + 2 * q] = z[0] - 1; d[g * 8 + 2 * q + 1] = z[1] - 2;
                d[(g + 8) * 8 + 2 * q] = z[2] - 3; d[(g + 8) * 8 + 2 * q + 1] = z[3] - 4;
            }",
        ),
    );
    let values =
        |count: u32, seed: u32| -> Vec<f32> { (0..count).map(|i| ((i * 7919 + seed) % 31) as f32 - 15.0).collect() };
    let (a, b) = (values(256, 3), values(128, 11));
    let expected: Vec<f32> = (0..128).map(|i| (0..16).map(|k| a[i / 8 * 16 + k] * b[i % 8 * 16 + k]).sum()).collect();
    for bf16 in [0, 1] {
        let halves = |values: &[f32]| -> Vec<u16> {
            let half = |&x: &f32| if bf16 == 1 { (x.to_bits() >> 16) as u16 } else { half_bits(x) };
            values.iter().map(half).collect()
        };
        let (at_a, at_b) = (bench.array(&halves(&a)), bench.array(&halves(&b)));
        for schedule in SCHEDULES {
            sim.set_schedule(schedule);
            let d = alloc(512).expect("memory");
            let args = [Arg::Pointer(at_a), Arg::Pointer(at_b), Arg::Pointer(d), Arg::U32(bf16)];
            bench.launch("product", (1, 32, 0), &args).expect("a launch");
            assert_eq!(bench.read::<f32>(d, 128), expected, "bf16 {bf16}, {schedule:?}");
        }
    }
}

/// IEEE half precision of a small whole number.
fn half_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    if x == 0.0 {
        0
    } else {
        ((bits >> 16) & 0x8000 | (((bits >> 23) & 0xff) - 112) << 10 | (bits >> 13) & 0x3ff) as u16
    }
}

#[test]
fn collectives_that_not_all_reach_are_reported() {
    let sim = alone();
    let cases = [
        (
            "if (threadIdx.x < 64) __syncthreads();\n else\n __syncthreads();",
            "divergent barrier: __syncthreads at test.cu:6",
        ),
        ("if (threadIdx.x < 16) x[0] = __shfl_xor_sync(~0u, x[1], 1);", "returned while lanes 0000ffff"),
        ("if (threadIdx.x < 16) return;\n __syncwarp();", "lanes 0000ffff have returned"),
        ("x[0] = __shfl_xor_sync(0xffffu, x[1], 1);", "only the full mask"),
        (
            "if (threadIdx.x < 16) __syncwarp(); else __syncthreads();",
            "__syncwarp at test.cu:4 reached by lanes 0000ffff",
        ),
    ];
    for (body, expected) in cases {
        let bench = Bench::new(&format!("KERNEL(128) uneven(float* x) {{\n{body}\n}}"));
        let x = bench.array(&[0f32, 0.0]);
        bench.launch("uneven", (1, 128, 0), &[Arg::Pointer(x)]).expect("a launch");
        let code = bench.synchronize();
        let report = sim.last_report();
        assert!(report.starts_with("kernel uneven, block (0,0,0), thread ("), "{report}");
        assert!(report.contains(expected), "{body}: {report}");
        assert_eq!(code, Err(719), "{body}");
    }
}

#[test]
fn threads_that_return_do_not_hold_up_a_barrier() {
    let (sim, bench) = (
        alone(),
        Bench::new(
            "KERNEL(128) early(u32* x, u32 n) {
        if (threadIdx.x >= n) return;
        x[threadIdx.x] = threadIdx.x;
        __syncthreads();
        u32 next = x[(threadIdx.x + 1) % n];
        __syncthreads();
        x[threadIdx.x] = next;
    }",
        ),
    );
    for schedule in SCHEDULES {
        sim.set_schedule(schedule);
        let x = alloc(4 * 50).expect("memory");
        bench.launch("early", (1, 128, 0), &[Arg::Pointer(x), Arg::U32(50)]).expect("a launch");
        assert_eq!(bench.read::<u32>(x, 50), (0..50).map(|i| (i + 1) % 50).collect::<Vec<_>>(), "{schedule:?}");
    }
}

#[test]
fn an_endless_loop_is_broken_off() {
    let (sim, bench) = (alone(), Bench::new("KERNEL(32) endless(float* x) { while (*(volatile float*)x == 0) {} }"));
    sim.set_seconds(1);
    let x = bench.array(&[0f32]);
    bench.launch("endless", (1, 32, 0), &[Arg::Pointer(x)]).expect("a launch");
    assert_eq!(bench.synchronize(), Err(719));
    assert!(sim.last_report().contains("test.cu:3: runs for too long"), "{}", sim.last_report());
}

#[test]
fn products_of_matrices_are_those_of_the_definition() {
    let (sim, bench) = (alone(), Bench::new(ADD));
    let (m, n, k) = (37, 5, 70);
    let halves = |values: &[f32]| values.iter().map(|x| (x.to_bits() >> 16) as u16).collect::<Vec<u16>>();
    let exact = |values: Vec<f32>| -> Vec<f32> { values.iter().map(|x| x.round()).collect() };
    let (a, b, c) = (exact(numbers(m * k)), exact(numbers(n * k)), exact(numbers(m * n)));
    let (at_a, at_b, at_d) = (bench.array(&halves(&a)), bench.array(&halves(&b)), bench.array(&c));
    let scratch = alloc(1 << 16).expect("memory");
    // a as m rows of k values, b as n rows of k values, d as n rows of m values: column-major, a transposed.
    let layout = |kind, rows, columns| {
        blas::create_matrix_layout(kind, rows as u64, columns as u64, rows as i64).expect("a layout")
    };
    use blas_sys::cudaDataType::{CUDA_R_16BF, CUDA_R_32F};
    let [la, lb, ld] = [layout(CUDA_R_16BF, k, m), layout(CUDA_R_16BF, k, n), layout(CUDA_R_32F, m, n)];
    let product = || {
        let handle = blas::create_handle().expect("a handle");
        let what =
            blas::create_matmul_desc(blas_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, CUDA_R_32F).expect("a product");
        let preference = blas::create_matmul_pref().expect("a preference");
        let (transposed, room) = (1i32, 1usize << 16);
        let (alpha, beta) = (2f32, 3f32);
        // SAFETY: handles that live, sizes of the arrays above.
        unsafe {
            use blas_sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
            use blas_sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            blas::set_matmul_desc_attribute(what, CUBLASLT_MATMUL_DESC_TRANSA, (&raw const transposed).cast(), 4)
                .expect("set");
            blas::set_matmul_pref_attribute(
                preference,
                CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const room).cast(),
                8,
            )
            .expect("set");
            let found =
                blas::get_matmul_algo_heuristic(handle, what, la, lb, ld, ld, preference).expect("an algorithm");
            let (alpha, beta) = ((&raw const alpha).cast(), (&raw const beta).cast());
            let (pa, pb, pd) = (at_a as *const c_void, at_b as *const c_void, at_d as *mut c_void);
            let (algorithm, scratch) = (&raw const found.algo, scratch as *mut c_void);
            let stream = bench.stream.cast();
            blas::matmul(handle, what, alpha, beta, pa, la, pb, lb, pd, ld, pd, ld, algorithm, scratch, room, stream)
                .expect("a product");
        }
    };
    let expected = |c: &[f32]| -> Vec<f32> {
        (0..m * n)
            .map(|i| 2.0 * (0..k).map(|l| a[i % m * k + l] * b[i / m * k + l]).sum::<f32>() + 3.0 * c[i])
            .collect()
    };
    product();
    let once = expected(&c);
    assert_eq!(bench.read::<f32>(at_d, m * n), once);
    let graph = capture(bench.stream, product).expect("a graph");
    // SAFETY: the graph and its memory live.
    unsafe { call(sys::cuGraphLaunch(graph, bench.stream)) }.expect("a launch");
    assert_eq!(bench.read::<f32>(at_d, m * n), expected(&once), "captured too");
    assert_eq!(sim.calls("cublasLtMatmul"), 2);
}
