//! Variables of a part of a template.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use crate::value::{Scope, Value};

impl Scope {
    pub(crate) fn within(parent: &Rc<Self>) -> Rc<Self> {
        Rc::new(Self {
            variables: RefCell::default(),
            parent: RefCell::new(Some(parent.clone())),
        })
    }

    pub(crate) fn set(&self, name: &Arc<str>, value: Value) {
        self.variables.borrow_mut().insert(name.clone(), value);
    }

    pub(crate) fn get(&self, name: &str) -> Option<Value> {
        self.variables.borrow().get(name).cloned()
    }

    pub(crate) fn parent(&self) -> Option<Rc<Self>> {
        self.parent.borrow().clone()
    }

    /// Drops the variables, which may hold this scope.
    pub(crate) fn clear(&self) {
        let variables = self.variables.take();
        let parent = self.parent.take();
        drop((variables, parent));
    }
}
