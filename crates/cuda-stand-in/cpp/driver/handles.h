// Handles by which programs name the driver's objects. A number is given out once, so that the handle of a destroyed
// object is always recognised, even if its memory is in use again.
#pragma once
#include <memory>
#include <unordered_map>

namespace stand_in {

template <class Object, class Handle>
class Handles {
public:
    using Name = Handle;

    Handle insert(std::shared_ptr<Object> object) {
        const uintptr_t number = next_;
        next_ += STEP;
        objects_[number] = std::move(object);
        return reinterpret_cast<Handle>(number);
    }

    // Null if the handle was never given out, or its object is destroyed.
    std::shared_ptr<Object> find(Handle handle) const {
        const auto found = objects_.find(reinterpret_cast<uintptr_t>(handle));
        return found == objects_.end() ? nullptr : found->second;
    }

    std::shared_ptr<Object> remove(Handle handle) {
        const auto found = objects_.find(reinterpret_cast<uintptr_t>(handle));
        if (found == objects_.end()) return nullptr;
        const auto object = std::move(found->second);
        objects_.erase(found);
        return object;
    }

    const std::unordered_map<uintptr_t, std::shared_ptr<Object>>& all() const { return objects_; }

private:
    // Above the fixed handles, in the first page: a program that follows one faults.
    static constexpr uintptr_t FIRST = 16;
    static constexpr uintptr_t STEP = 16;

    uintptr_t next_ = FIRST;
    std::unordered_map<uintptr_t, std::shared_ptr<Object>> objects_;
};

}  // namespace stand_in
