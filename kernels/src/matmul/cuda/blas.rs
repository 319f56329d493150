//! Products of many rows by cuBLASLt, where it is installed. Owner: [`super::MatmulKernels`] has the library's handle, a
//! scratch the plans. Invariant: what was chosen for a shape is looked up once; after that, a product allocates nothing
//! and may be recorded. Matrices are row-major here and column-major there, so y^T = w x^T is what is asked for.

use crate::cuda::{Array, CudaError, Gpu, Stream};
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use std::collections::HashMap;
use std::ffi::c_void;

/// `CUBLAS_OP_T` of `cublasOperation_t`, which the bindings lack.
const TRANSPOSED: i32 = 1;

/// The library.
#[derive(Debug)]
pub(super) struct Blas {
    gpu: Gpu,
    handle: sys::cublasLtHandle_t,
}

// SAFETY: cuBLASLt lets any thread use a handle, several at once.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

/// One product `y = scale * x . w`.
#[derive(Debug)]
pub(super) struct Operands {
    /// Whether `weights` and `x` are f16, otherwise bf16.
    pub(super) f16: bool,
    /// Rows of `weights`.
    pub(super) outputs: usize,
    /// Rows of `x`.
    pub(super) rows: usize,
    /// Values from one row of `weights` or `x` to the next, padding of zeros included.
    pub(super) pitch: usize,
    /// Values from one row of `y` to the next.
    pub(super) stride: usize,
    /// Address of `[outputs, pitch]`.
    pub(super) weights: u64,
    /// Address of `[rows, pitch]`.
    pub(super) x: u64,
    /// Address of `[rows, stride]` f32, of which the first `outputs` of each row are written.
    pub(super) y: u64,
    /// What the sums are multiplied with.
    pub(super) scale: f32,
}

/// What a plan depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    f16: bool,
    outputs: usize,
    rows: usize,
    pitch: usize,
    stride: usize,
}

/// What was chosen for shapes.
#[derive(Debug, Default)]
pub(super) struct Plans(HashMap<Shape, Plan>);

fn failed(call: &'static str) -> impl FnOnce(CublasError) -> CudaError {
    move |CublasError(status)| CudaError::Call { call, code: status as u32, name: format!("{status:?}") }
}

impl Blas {
    /// `None` where the library is not installed.
    pub(super) fn open(gpu: &Gpu) -> Result<Option<Self>, CudaError> {
        // SAFETY: only loads the library by its name; cudarc would panic at the first call if it were missing.
        if !unsafe { sys::is_culib_present() } {
            return Ok(None);
        }
        let created = gpu.call("cublasLtCreate", || Ok(result::create_handle()))?;
        Ok(Some(Blas { gpu: gpu.clone(), handle: created.map_err(failed("cublasLtCreate"))? }))
    }

    /// Gives a product to the stream.
    pub(super) fn multiply(
        &self,
        stream: &Stream,
        operands: &Operands,
        (plans, workspace): (&mut Plans, &Array<u8>),
    ) -> Result<(), CudaError> {
        let &Operands { f16, outputs, rows, pitch, stride, .. } = operands;
        let shape = Shape { f16, outputs, rows, pitch, stride };
        let plan = match plans.0.entry(shape) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                let made = self.gpu.call("cublasLtMatmulAlgoGetHeuristic", || Ok(self.plan(shape, workspace.len())))?;
                entry.insert(made?)
            }
        };
        let (alpha, beta) = (operands.scale, 0.0_f32);
        let multiplied = stream.call("cublasLtMatmul", |raw| {
            let y = operands.y as *mut c_void;
            // SAFETY: the plan's parts live; the addresses are those of arrays of the plan's sizes, as the caller says;
            // alpha and beta are read during the call.
            Ok(unsafe {
                result::matmul(
                    self.handle,
                    plan.product.0,
                    std::ptr::from_ref(&alpha).cast(),
                    std::ptr::from_ref(&beta).cast(),
                    operands.weights as *const c_void,
                    plan.weights.0,
                    operands.x as *const c_void,
                    plan.x.0,
                    y,
                    plan.y.0,
                    y,
                    plan.y.0,
                    &plan.algorithm,
                    workspace.view().pointer() as *mut c_void,
                    workspace.len(),
                    raw.cast(),
                )
            })
        })?;
        multiplied.map_err(failed("cublasLtMatmul"))
    }

    /// Asks for the algorithm that is expected to be fastest.
    fn plan(&self, shape: Shape, workspace: usize) -> Result<Plan, CudaError> {
        let Shape { f16, outputs, rows, pitch, stride } = shape;
        let half = if f16 { sys::cudaDataType::CUDA_R_16F } else { sys::cudaDataType::CUDA_R_16BF };
        let float = sys::cudaDataType::CUDA_R_32F;
        let layout = |kind, rows: usize, cols: usize, stride: usize| {
            let made = result::create_matrix_layout(kind, rows as u64, cols as u64, stride as i64);
            made.map(Matrix).map_err(failed("cublasLtMatrixLayoutCreate"))
        };
        let weights = layout(half, pitch, outputs, pitch)?;
        let x = layout(half, pitch, rows, pitch)?;
        let y = layout(float, outputs, rows, stride)?;
        let product = result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, float);
        let product = Product(product.map_err(failed("cublasLtMatmulDescCreate"))?);
        let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        // SAFETY: the descriptor lives, and the value is of the attribute's type.
        let set = unsafe {
            result::set_matmul_desc_attribute(product.0, attribute, std::ptr::from_ref(&TRANSPOSED).cast(), 4)
        };
        set.map_err(failed("cublasLtMatmulDescSetAttribute"))?;
        let preference = Preference(result::create_matmul_pref().map_err(failed("cublasLtMatmulPreferenceCreate"))?);
        let attribute = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: the preference lives, and the value is of the attribute's type.
        let set = unsafe {
            result::set_matmul_pref_attribute(preference.0, attribute, std::ptr::from_ref(&workspace).cast(), 8)
        };
        set.map_err(failed("cublasLtMatmulPreferenceSetAttribute"))?;
        // SAFETY: all parts live.
        let chosen = unsafe {
            result::get_matmul_algo_heuristic(self.handle, product.0, weights.0, x.0, y.0, y.0, preference.0)
        };
        let algorithm = chosen.map_err(failed("cublasLtMatmulAlgoGetHeuristic"))?.algo;
        Ok(Plan { product, weights, x, y, algorithm })
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: created in `open` and destroyed here only; in a context that is gone there is nothing to destroy.
        let _gone_with_its_context =
            self.gpu.call("cublasLtDestroy", || Ok(unsafe { result::destroy_handle(self.handle) }));
    }
}

/// How a product of a shape is made.
#[derive(Debug)]
struct Plan {
    product: Product,
    weights: Matrix,
    x: Matrix,
    y: Matrix,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// Descriptors in host memory.
macro_rules! descriptors {
    ($($name:ident $raw:ty, $destroy:path;)*) => { $(
        #[derive(Debug)]
        struct $name($raw);

        // SAFETY: plain memory of the host without ties to a thread.
        unsafe impl Send for $name {}
        // SAFETY: shared use only reads.
        unsafe impl Sync for $name {}

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: created once and destroyed here only. Failing means that there is nothing to free.
                let _nothing_to_free = unsafe { $destroy(self.0) };
            }
        }
    )* };
}

descriptors! {
    Product sys::cublasLtMatmulDesc_t, result::destroy_matmul_desc;
    Matrix sys::cublasLtMatrixLayout_t, result::destroy_matrix_layout;
    Preference sys::cublasLtMatmulPreference_t, result::destroy_matmul_pref;
}
