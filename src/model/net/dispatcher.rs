//! Operators of libtorch that tch does not wrap, called by name.
//!
//! libtorch_cpu.so exports a C interface that its own compiled models use: an operator gets a stack of
//! 64-bit words, one an argument, and leaves its results there. Autograd records such a call like any
//! other. What a word holds: integers and booleans their value, floats their bits, tensors and lists
//! a handle that the call consumes, optional values null or a pointer to a word on the C++ heap.

use std::{
    ffi::{c_char, c_void, CString},
    ptr::null_mut,
};
use tch::Tensor;

/// Version of the interface: that of libtorch 2.11.
const INTERFACE: u64 = 0x020b_0000_0000_0000;

extern "C" {
    pub(super) fn torch_call_dispatcher(
        operator: *const c_char,
        overload: *const c_char,
        stack: *mut u64,
        version: u64,
    ) -> i32;
    fn torch_new_list_reserve_size(size: usize, list: *mut *mut c_void) -> i32;
    fn torch_list_push_back(list: *mut c_void, element: u64) -> i32;
    fn aoti_torch_new_tensor_handle(tensor: *const c_void, handle: *mut *mut c_void) -> i32;
    /// C++'s `operator new`: libtorch frees optional values with the matching `delete`.
    fn _Znwm(size: usize) -> *mut c_void;
}

/// One argument of an operator.
pub(super) enum Argument<'a> {
    /// A tensor.
    Tensor(&'a Tensor),
    /// A list of tensors.
    Tensors(&'a [Tensor]),
    /// A float.
    Float(f64),
    /// An integer, a symbolic size among them.
    Int(i64),
    /// A boolean.
    Bool(bool),
    /// An optional tensor that is there.
    SomeTensor(&'a Tensor),
    /// An optional value that is absent.
    Nothing,
}

impl Argument<'_> {
    fn word(&self) -> u64 {
        match self {
            Argument::Tensor(tensor) => handle(tensor),
            Argument::Tensors(tensors) => list(tensors),
            Argument::Float(value) => value.to_bits(),
            Argument::Int(value) => *value as u64,
            Argument::Bool(value) => u64::from(*value),
            Argument::SomeTensor(tensor) => boxed(handle(tensor)),
            Argument::Nothing => 0,
        }
    }
}

/// A new handle, which the call consumes.
fn handle(tensor: &Tensor) -> u64 {
    let mut new = null_mut();
    // SAFETY: tch's tensors are handles of the kind that this function takes; it makes another one.
    let code = unsafe { aoti_torch_new_tensor_handle(tensor.as_ptr().cast(), &mut new) };
    assert_eq!(code, 0, "libtorch makes no new handle to a tensor");
    new as u64
}

fn list(tensors: &[Tensor]) -> u64 {
    let mut new = null_mut();
    // SAFETY: the list is made here and owned by nobody else until the call takes it.
    unsafe {
        assert_eq!(
            torch_new_list_reserve_size(tensors.len(), &mut new),
            0,
            "libtorch makes no list"
        );
        for tensor in tensors {
            assert_eq!(
                torch_list_push_back(new, handle(tensor)),
                0,
                "libtorch's list takes no tensor"
            );
        }
    }
    new as u64
}

fn boxed(word: u64) -> u64 {
    // SAFETY: eight bytes from C++'s allocator, aligned for a word, which the call frees.
    unsafe {
        let place = _Znwm(size_of::<u64>()).cast::<u64>();
        place.write(word);
        place as u64
    }
}

/// Calls `aten::NAME` without an overload name and gives its results, all of them tensors.
///
/// # Panics
/// When libtorch refuses: its own text is on standard error. Arguments here are made by this program, so
/// that this is an error of the program.
pub(super) fn call(name: &str, arguments: &[Argument<'_>], results: usize) -> Vec<Tensor> {
    let mut stack: Vec<u64> = arguments.iter().map(Argument::word).collect();
    stack.resize(stack.len().max(results), 0);
    let operator = CString::new(format!("aten::{name}")).unwrap_or_else(|e| unreachable!("a name: {e}"));
    // SAFETY: the stack holds one word an argument in the order of the operator's schema, and has room for
    // the results.
    let code =
        unsafe { torch_call_dispatcher(operator.as_ptr(), c"".as_ptr(), stack.as_mut_ptr(), INTERFACE) };
    assert_eq!(code, 0, "libtorch refuses aten::{name}; the reason is above");
    // SAFETY: the results are handles that this caller owns.
    let own = |word: &u64| unsafe { Tensor::from_ptr(*word as *mut _) };
    stack[..results].iter().map(own).collect()
}
